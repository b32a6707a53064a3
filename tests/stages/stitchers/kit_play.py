"""Random agents before the kit's gateway, and the truth of what they did: who had which reply, who went on from what.

Every text is its own, so that nothing matches by chance; or, for twins, all agents have the same words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kit import Call, Story
from kit_agents import BASH, Chat, runs, tool, user
from kit_template import Reply

PLAIN = ("turn", "turn", "turn", "fork", "start", "retry", "hang_up", "error", "lost", "untrainable")
WILD = (*PLAIN, "tools", "system", "edit", "forget", "trim", "title", "sub_agent", "keep_broken", "rewrite")


@dataclass
class Player:
    """Plays several agents of one session at once. `twins`: they have the same words; `threads`: each says who it is;
    `curt`: every reply is the same.

    `had` are the calls whose reply an agent took, by number; `after` says of each call which one its agent had last.
    """

    story: Story
    rng: random.Random
    twins: bool = False
    threads: bool = False
    curt: bool = False
    agents: list[Chat] = field(default_factory=list)
    open: list[tuple[Chat, Call]] = field(default_factory=list)
    had: set[int] = field(default_factory=set)
    after: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    def play(self, calls: int, moves: tuple[str, ...] = PLAIN) -> Player:
        """Make about so many calls, some of them at the same time; all of them end but those that are lost."""
        while len(self.story.calls) < calls:
            if self.open and self.rng.random() < 0.5:
                self.settle(self.rng.randrange(len(self.open)))
            idle = [agent for agent in self.agents if not any(agent is busy for busy, _ in self.open)]
            move = self.rng.choice(moves) if idle else "start"
            agent = self.rng.choice(idle) if idle else None
            if agent is None or move == "start":
                self._turn(self._new())
            else:
                getattr(self, f"_{move}")(agent)
        while self.open:
            self.settle(0)
        return self

    def settle(self, index: int = -1) -> None:
        """A call that is under way ends, and its agent has the reply."""
        agent, call = self.open.pop(index)
        self._take(agent, call.finish(self._reply(agent, call)))

    def _begin(self, agent: Chat) -> Call:
        call = agent.begin()
        if id(agent) in self._last:
            self.after[call.number] = self._last[id(agent)]
        return call

    def _take(self, agent: Chat, call: Call) -> None:
        agent.take(call)
        self.had.add(call.number)
        self._last[id(agent)] = call.number

    # --- what is true ---

    def good(self) -> list[Call]:
        """The calls whose ids can be trained and whose reply an agent had."""
        return [call for call in self.story.calls if call.good and call.number in self.had]

    def branches(self) -> list[list[int]]:
        """Every walk over good calls, each going on from the longest ids that its prompt begins with."""
        good = self.good()
        parents: dict[int, int] = {}
        for call in good:
            earlier = [each for each in good if each is not call and call.prompt[: len(each.ids)] == each.ids]
            if earlier:
                parents[call.number] = max(earlier, key=lambda each: len(each.ids)).number
        leaves = {call.number for call in good} - set(parents.values())
        walks = []
        for leaf in leaves:
            walk = [leaf]
            while walk[0] in parents:
                walk.insert(0, parents[walk[0]])
            walks.append(walk)
        return sorted(walks)

    # --- moves ---

    def _new(self, **given: Any) -> Chat:
        number = len(self.agents)
        headers = {"thread-id": f"t{number}"} if self.threads else {}
        system = "You are one of many." if self.twins else f"You are agent {number}."
        agent = Chat(self.story, **{"system": system, "tools": BASH, "headers": headers, **given})
        self.agents.append(agent)
        return agent

    def _number(self, agent: Chat) -> int:
        """What makes words differ: how far the agent is, or, where nothing is to match, how far all are."""
        return len(agent.history) if self.twins else len(self.story.calls)

    def _say(self, agent: Chat) -> None:
        """The next thing that an agent says: the results that the last reply waits for, or a question."""
        number = self._number(agent)
        last = agent.history[-1] if agent.history else {}
        called = last.get("tool_calls") or ()
        agent.history += [
            {"role": "tool", "tool_call_id": each["id"], "content": f"result {number} {at}"}
            for at, each in enumerate(called)
        ] or [user(f"question {number}")]

    def _reply(self, agent: Chat, call: Call) -> Reply:
        if self.curt:
            return Reply(text="Done.")
        number = len(agent.history) if self.twins else call.number
        # Twins that think otherwise and say the same cannot be told apart by what they echo.
        thinks = f"thought {number}" if not self.twins and self.rng.random() < 0.4 else ""
        if self.rng.random() < 0.4:
            return runs(f"command {number}", thinks=thinks)
        return Reply(text=f"answer {number}", thinks=thinks)

    def _turn(self, agent: Chat) -> None:
        self._say(agent)
        self.open.append((agent, self._begin(agent)))
        if self.rng.random() < 0.6:
            self.settle()

    def _fork(self, agent: Chat) -> None:
        given = {} if self.threads else {"headers": agent.headers}
        other = self._new(system=agent.system, tools=agent.tools, history=deepcopy(agent.history), **given)
        if id(agent) in self._last:
            self._last[id(other)] = self._last[id(agent)]
        self._turn(other)

    def _retry(self, agent: Chat) -> None:
        """The reply came to its end, but not to the agent, which asks the same again."""
        self._say(agent)
        call = self._begin(agent)
        call.finish(self._reply(agent, call))
        self.open.append((agent, self._begin(agent)))
        self.settle()

    def _hang_up(self, agent: Chat) -> None:
        self._say(agent)
        self._begin(agent).finish(Reply(text="the beg"), status="aborted", why="the agent went away")
        self.open.append((agent, self._begin(agent)))
        self.settle()

    def _error(self, agent: Chat) -> None:
        self._say(agent)
        for _ in range(self.rng.randint(1, 3)):
            self._begin(agent).finish(status="error", why="the server failed")
        self.open.append((agent, self._begin(agent)))
        self.settle()

    def _lost(self, agent: Chat) -> None:
        """The gateway died: there is an intent and no end."""
        said = len(agent.history)
        self._say(agent)
        self._begin(agent)
        del agent.history[said:]

    def _untrainable(self, agent: Chat) -> None:
        self._say(agent)
        call = self._begin(agent)
        self._take(agent, call.finish(self._reply(agent, call), constrained="a grammar held the model"))

    def _tools(self, agent: Chat) -> None:
        agent.tools = [*BASH, tool(f"tool{len(self.story.calls)}")]
        self._turn(agent)

    def _system(self, agent: Chat) -> None:
        agent.system = f"You are another one, {len(self.story.calls)}."
        self._turn(agent)

    def _edit(self, agent: Chat) -> None:
        at = self.rng.randrange(len(agent.history))
        if isinstance(agent.history[at].get("content"), str):
            agent.history[at] = {**agent.history[at], "content": f"edited {len(self.story.calls)}"}
        self._turn(agent)

    def _forget(self, agent: Chat) -> None:
        """Reasoning is not echoed any more."""
        for message in agent.history:
            message.pop("reasoning_content", None)
        self._turn(agent)

    def _trim(self, agent: Chat) -> None:
        agent.history = agent.history[self.rng.randrange(len(agent.history)) :]
        self._turn(agent)

    def _rewrite(self, agent: Chat) -> None:
        """Arguments are written anew."""
        for message in agent.history:
            for called in message.get("tool_calls") or ():
                called["function"]["arguments"] += " "
        self._turn(agent)

    def _title(self, agent: Chat) -> None:
        side = Chat(self.story, system="Write a title for this conversation.")
        call = side.begin(user(f"question {len(self.story.calls)}"))
        call.finish(Reply(text=f"title {call.number}"))
        self.had.add(call.number)

    def _sub_agent(self, agent: Chat) -> None:
        number = len(self.story.calls)
        headers = {"x-claude-code-agent-id": f"a{number}"}
        self._turn(self._new(system=f"You are quick, {number}.", headers=headers))

    def _keep_broken(self, agent: Chat) -> None:
        self._say(agent)
        call = agent.begin()
        call.finish(Reply(text=f"the beginning of {call.number}"), status="aborted", why="the stream broke")
        agent.history.append({"role": "assistant", "content": f"the beginning of {call.number}"})
        self._turn(agent)


def shuffled(events: Sequence[Any], rng: random.Random) -> list[Any]:
    """In another order, with some twice, and some stored again later, as by a gateway that repeats itself."""
    late = max(seq for seq, _ in events) + 1
    doubled = [*events, *rng.sample(events, len(events) // 2)]
    doubled += [(late + at, event) for at, (_, event) in enumerate(rng.sample(events, len(events) // 3))]
    rng.shuffle(doubled)
    return doubled
