"""Names and labels of containers: whose they are. Without an engine."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.schemas.sandbox import Limits
from rollyard.stages.sandbox import Labels, Plan
from rollyard.stages.sandboxes.docker_container import Image, facts, filled, host_config
from rollyard.stages.sandboxes.docker_labels import Facts, docker_labels, facts_of, name_of, owned
from rollyard.stages.sandboxes.docker_settings import DockerSettings

NONCE = "0123456789abcdef"
FACTS = Facts(nonce=NONCE, workdir="/work dir", user="1000:1000", gateway=True, read_only=True, max_file_bytes=7)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
ids = st.text("abcXYZ019_-", min_size=1, max_size=40)
labels_of = st.builds(
    Labels,
    run=texts,
    rollout_id=ids,
    attempt=st.integers(0, 1000),
    owner=texts,
    created_ms=st.integers(0, 1 << 45),
    role=st.sampled_from(["agent", "eval", "check"]),
)


@given(labels_of)
def test_labels_come_back(labels: Labels) -> None:
    kept = docker_labels(labels, FACTS, installation="i", deadline_ms=5)
    assert owned(["/" + name_of(labels, NONCE)], kept) == labels
    assert facts_of(kept) == FACTS


@given(labels_of)
def test_a_claimed_container_belongs_to_whom_its_name_says(labels: Labels) -> None:
    warm = Labels(run="", rollout_id="warm", attempt=0, owner="w", created_ms=1, role="warm")
    kept = docker_labels(warm, FACTS, installation="i", deadline_ms=5)
    assert owned(["/" + name_of(warm, NONCE)], kept) == warm
    assert owned(["/" + name_of(labels, NONCE, claimed=True)], kept) == labels


def test_what_others_made_is_not_ours() -> None:
    labels = Labels(run="r", rollout_id="a", attempt=1, owner="w", created_ms=1)
    kept = docker_labels(labels, FACTS, installation="i", deadline_ms=5)
    # A container that somebody made of a snapshot has inherited our labels.
    for name in (
        "/eager_curie",
        "/rollyard",
        "/rollyard-x",
        "/my-rollyard-a.1-" + NONCE,
        "/rollyard-a.1-" + NONCE + "x",
    ):
        assert owned([name], kept) is None
    assert facts_of({"a": "b"}) is None


def test_labels_that_cannot_be_read_give_the_id_of_the_name() -> None:
    found = owned(["/rollyard-abc.7-" + NONCE], {})
    assert found is not None and (found.rollout_id, found.attempt, found.run) == ("abc", 7, "")


def test_a_plan_is_filled_from_image_and_settings() -> None:
    settings = DockerSettings(root="r", memory_bytes=1 << 30, user="u")
    image = Image(identity="sha256:1", user="imaged", workdir="/app")
    whole = filled(Plan(network="none", limits=Limits(cpus=2)), image, settings)
    assert (whole.image, whole.workdir, whole.user) == ("sha256:1", "/app", "u")
    assert whole.limits == Limits(cpus=2, memory_bytes=1 << 30, max_processes=1024, max_file_bytes=256 << 20)
    assert filled(Plan(), Image(identity="x", workdir="/"), settings).workdir == "/rollyard/work"
    assert filled(Plan(user="v", workdir="/a/"), image, structs.replace(settings, user="")).user == "v"


def test_the_host_config_says_what_the_plan_says(tmp_path: Path) -> None:
    settings = DockerSettings(root="r", relay=str(tmp_path), extra={"ShmSize": 5}, runtime="runsc")
    limits = Limits(cpus=0.5, memory_bytes=1 << 26, max_processes=9, disk_bytes=1 << 21)
    plan = filled(Plan(network="gateway", read_only=True, workdir="/app", limits=limits), Image(identity="x"), settings)
    config = host_config(plan, facts(plan, NONCE, settings), settings)
    assert (config["NanoCpus"], config["Memory"], config["MemorySwap"], config["PidsLimit"]) == (
        5e8,
        1 << 26,
        1 << 26,
        9,
    )
    assert (config["CapDrop"], config["SecurityOpt"], config["NetworkMode"]) == (["ALL"], ["no-new-privileges"], "none")
    assert (config["ReadonlyRootfs"], config["ShmSize"], config["Runtime"]) == (True, 5, "runsc")
    assert all("size=2097152" in options and "exec" in options for options in config["Tmpfs"].values())
    targets = {mount["Target"]: mount.get("ReadOnly", False) for mount in config["Mounts"]}
    assert targets == {"/rollyard-relay": True, "/app": False}
    # Only the folder with the gateway's socket, never the relay's own.
    assert {mount.get("Source") for mount in config["Mounts"]} == {str(tmp_path / "shared"), None}
