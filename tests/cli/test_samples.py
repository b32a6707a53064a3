"""`rollyard samples`: what a user sees of the Parquet files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from branches import BREAK_AT, RE_TOKENISED, ROLLOUT, branch, delivery, forest, write
from kit import Story
from kit_agents import BASH, Messages, blocks, runs, text, tool, tool_result
from kit_template import Reply
from msgspec import structs

from rollyard.cli import main
from rollyard.gateway.local_model import demo_model_path
from rollyard.gateway.tokens.tokenizer import load_tokenizer
from rollyard.schemas.failure import Failure
from rollyard.schemas.sample import Sample


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


SAMPLES = Path(".rollyard/samples")


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["samples", *arguments]) == code
    return capsys.readouterr().out


# --- show ---


def test_a_rollout_is_shown_with_all_its_branches(capsys: pytest.CaptureFixture[str]) -> None:
    samples = forest()
    write(
        SAMPLES,
        delivery(samples, excluded={"lost": 2}, answer="All is well.", metrics={"passed": 3}, rewards={"style": 0.5}),
    )
    said = out(capsys, "show", ROLLOUT)
    assert said.startswith(f"rollout  {ROLLOUT}\nrun      demo\ngroup    mend, rollout 0 of it, attempt 1\n")
    assert "samples  4, from 7 of 9 calls; 106 of 529 tokens are trained\nleft out 2 lost\n" in said
    assert 'rewards  style 0.5\nmetrics  passed 3\nanswer   "All is well."\n' in said
    assert said.count("── branch") == 4
    assert f"⟪the first {BREAK_AT} tokens are those of branch 1⟫" in said
    assert "\x1b" not in said
    one = out(capsys, "show", samples[2].sample_id)
    assert one.count("── branch") == 1
    assert "branch 4 of 4" in one, "the tree is that of the whole rollout"


def test_json_is_a_sample_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    write(SAMPLES, delivery(forest()))
    lines = out(capsys, "show", ROLLOUT, "--json").splitlines()
    assert [json.loads(line)["sample_id"] for line in lines] == [sample.sample_id for sample in forest()]
    assert len(out(capsys, "show", forest()[1].sample_id, "--json").splitlines()) == 1


def test_colours_are_decided_by_the_user_then_by_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(SAMPLES, delivery(forest()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in out(capsys, "show", ROLLOUT)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in out(capsys, "show", ROLLOUT)


@pytest.mark.parametrize(("term", "coloured"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_gets_colours(term: str, coloured: bool) -> None:
    write(SAMPLES, delivery(forest()))
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "rollyard", "samples", "show", forest()[2].sample_id]
    done = subprocess.run(command, stdout=theirs, env=os.environ | {"TERM": term}, check=True)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 65536):
            said += chunk
    except OSError:  # Linux says so at the end of a terminal
        pass
    os.close(ours)
    assert done.returncode == 0
    assert (b"\x1b[" in said) is coloured
    assert (b"\xe2\x9f\xa6" in said) is not coloured


def test_a_rollout_without_samples_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure.of("agent", "it gave up")
    write(SAMPLES, delivery((), status="failed", failure=failure, reward=None))
    said = out(capsys, "show", ROLLOUT)
    assert "status   failed\nfailure  agent: it gave up\nreward   none\nsamples  none\n" in said


def test_rollouts_whose_ids_begin_alike_are_all_shown_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    def rollout(number: int) -> object:
        sample = branch(0, 1, [("c1", "p", "r")], rollout_id=f"r{number:02d}", sample_id=f"s{number:02d}")
        return delivery((sample,), rollout_id=f"r{number:02d}", index=number)

    write(SAMPLES, *(rollout(number) for number in range(23)))
    assert main(["samples", "show", "r"]) == 0
    said = capsys.readouterr()
    assert re.findall(r"^rollout  (\w+)$", said.out, re.MULTILINE) == [f"r{number:02d}" for number in range(20)]
    assert said.err == "20 of 23 rollouts are shown; a longer id names fewer\n"
    assert re.findall(r"^sample   (\w+)$", out(capsys, "show", "s1"), re.MULTILINE) == [
        f"s{number}" for number in range(10, 20)
    ]


# --- html ---


def test_a_page_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    write(SAMPLES, delivery(forest()))
    assert re.fullmatch(rf"rollyard-{ROLLOUT}\.html \(\d\d kB\)\n", out(capsys, "show", ROLLOUT, "--html"))
    written = Path(f"rollyard-{ROLLOUT}.html").read_text()
    HTMLParser().feed(written)
    assert written.count('<section id="b') == 4
    out(capsys, "show", forest()[0].sample_id, "--html", "one.html")
    assert Path("one.html").read_text().count('<section id="b') == 1
    assert out(capsys, "show", ROLLOUT, "--html", "-") == written


def test_a_page_is_of_one_rollout_and_goes_where_it_can_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    write(SAMPLES, delivery(forest()), delivery((), rollout_id="r5d4", index=1))
    assert main(["samples", "show", "r5", "--html"]) == 2
    said = capsys.readouterr().err
    assert "2 rollouts have an id that begins with 'r5', and a page is of one" in said
    assert f"give a longer one: {ROLLOUT}, r5d4" in said
    assert main(["samples", "show", ROLLOUT, "--html", "none/page.html"]) == 2
    assert "cannot write the page to none/page.html: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["samples", "show", ROLLOUT, "--html", "a.html", "--json"])


# --- drift ---


def test_the_table_of_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        SAMPLES,
        delivery(
            forest(),
            drift={"re_tokenised": 1, "sub_agent": 2},
            lenience={"trailing_space": 4},
            excluded={"lost": 1},
        ),
    )
    said = out(capsys, "drift", "--run", "demo")
    assert said.startswith(
        "Run demo: 1 rollout, 9 calls.\n"
        "1 of them (11.1%) left the tokens of the call whose conversation they continue.\n"
    )
    assert re.search(r"^re_tokenised +break +1 +11.1% +1$", said, re.MULTILINE)
    assert re.search(r"^sub_agent +structure +2 +22.2% +1$", said, re.MULTILINE)
    assert f"re_tokenised: leaves the tokens of c2 at {BREAK_AT}, in message 3\n" in said
    assert f"  in        rollout {ROLLOUT}, sample {forest()[1].sample_id}, call c5\n" in said
    assert "  expected  32 49 32 105" in said
    assert "  messages  'The + 1' became 'The +1'\n" in said
    assert re.search(r"lenient rules:\n\nrule +calls\n-+ +-+\ntrailing_space +4$", said, re.MULTILINE)
    assert re.search(r"out of the samples:\n\nreason +calls\n-+ +-+\nlost +1$", said, re.MULTILINE)


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    write(SAMPLES, delivery(forest(), drift={"re_tokenised": 3}, lenience={"trailing_space": 4}))
    said = json.loads(out(capsys, "drift", "--run", "demo", "--json"))
    assert {name: said[name] for name in ("run", "rollouts", "calls", "lenience", "excluded")} == {
        "run": "demo",
        "rollouts": 1,
        "calls": 9,
        "lenience": {"trailing_space": 4},
        "excluded": {},
    }
    (reason,) = said["drift"]
    assert (reason["reason"], reason["structural"], reason["calls"], reason["rollouts"]) == (
        "re_tokenised",
        False,
        3,
        1,
    )
    assert reason["share"] == pytest.approx(1 / 3)
    example = reason["example"]
    assert (example["call_id"], example["continues"], example["position"]) == ("c5", "c2", BREAK_AT)
    assert example["expected"]["ids"][:2] == [32, 49]
    assert example["expected"]["text"] is None


def test_a_run_without_drift_says_so_and_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write(SAMPLES, delivery(()))
    assert out(capsys, "drift", "--run", "demo") == (
        "Run demo: 1 rollout, 9 calls.\nNone of them left the tokens of the call whose conversation they continue.\n"
    )
    assert main(["samples", "drift", "--run", "dem"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rollyard: there is no rollout of run 'dem' in .rollyard/samples (runs there: demo;")


# --- with a tokenizer, and with the stitcher ---


@pytest.mark.model
def test_ids_become_text_with_the_tokenizer_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(demo_model_path())
    tokenizer = load_tokenizer(Path(path))
    prompt, reply = tokenizer.encode_plain("Say a price in euros."), tokenizer.encode_plain("It is 5 €\U0001f680.")
    sample = structs.replace(
        branch(0, 1, [("c1", "p" * len(prompt), "r" * len(reply))], drift=(RE_TOKENISED,)), token_ids=prompt + reply
    )
    write(SAMPLES, delivery((sample,), drift={"re_tokenised": 1}))
    said = out(capsys, "show", ROLLOUT, "--tokenizer", path)
    assert "Say a price in euros.⟦It is 5 €\U0001f680.⟧" in said
    out(capsys, "show", ROLLOUT, "--tokenizer", path, "--html", "p.html")
    page = Path("p.html").read_text()
    shown = re.findall(r'<span class="s[^>]*data-i="([0-9,]+)"[^>]*>([^<]*)</span>', page)
    assert [int(number) for ids, _ in shown for number in ids.split(",")] == reply.tolist()
    assert "".join(text for _, text in shown) == "It is 5 €\U0001f680."
    assert len(shown) < len(reply), "the rocket takes several tokens"
    example = json.loads(out(capsys, "drift", "--run", "demo", "--tokenizer", path, "--json"))["drift"][0]["example"]
    assert example["found"]["text"] == tokenizer.decode(RE_TOKENISED.found, skip_special=False)
    assert '  expected  "' in out(capsys, "drift", "--run", "demo", "--tokenizer", path)


def real_forest() -> tuple[tuple[Sample, ...], dict[str, int]]:
    """An agent that asks a sub-agent, rewrites its history and condenses it, stitched."""
    story = Story()
    session = {"x-claude-code-session-id": "s1"}
    main_agent = Messages(story, tools=[*BASH, tool("Agent")], headers=session)
    start = main_agent.ask(blocks("look into it"), reply=runs("read the notes", name="Agent"))
    sub = Messages(story, system="You are quick.", tools=BASH, headers={**session, "x-claude-code-agent-id": "a1"})
    first = sub.ask(blocks("read the notes"), reply=runs("cat notes"))
    sub.ask(blocks(tool_result(first, "they are empty")), reply=Reply(text="Nothing is in them."))
    main_agent.ask(blocks(tool_result(start, text("Nothing is in them."))), reply=Reply(text="I see."))
    main_agent.history[0] = blocks("look into it, please")
    main_agent.ask(blocks("go on"), reply=Reply(text="Done."))
    outcome = story.outcome()
    return outcome.samples, dict(outcome.drift)


def test_what_the_stitcher_makes_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    samples, drift = real_forest()
    write(SAMPLES, delivery(samples, run="run", rollout_id=samples[0].rollout_id, drift=drift))
    said = out(capsys, "show", samples[0].rollout_id)
    tree = said.split("\n\n")
    print(said)
    assert "↳ sub_agent of call 1" in said
    assert "✗ history_edited: leaves the tokens of call 2" in said
    assert len(tree) > 3
    out(capsys, "show", samples[0].rollout_id, "--html", "p.html")
    page = Path("p.html").read_text()
    assert page.count("data-i=") == sum(sample.loss_mask.data.count(1) for sample in samples)
    said = out(capsys, "drift", "--run", "run")
    assert re.search(r"^history_edited +break +1 ", said, re.MULTILINE)
    assert re.search(r"^sub_agent +structure +1 ", said, re.MULTILINE)
