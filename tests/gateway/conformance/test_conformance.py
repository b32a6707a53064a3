"""Every protocol, every feature, through a whole gateway over HTTP; and the table of docs/gateway.md says so."""

from __future__ import annotations

import pytest
from conformance_table import CASES, PROTOCOLS, Feature, Unsupported, features, table, written
from gateway_rig import Rig

from rollyard.gateway.service import RunningGateway

RUNS = [
    pytest.param(feature, protocol, model, id=f"{feature.case.__name__}-{protocol}-{model}")
    for feature in features()
    for protocol, model in feature.runs()
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("feature", "protocol", "model"), RUNS)
async def test_a_feature_is_as_its_cell_says(
    rig: Rig, gateway: RunningGateway, feature: Feature, protocol: str, model: str
) -> None:
    talk = rig.talk(gateway, protocol, model, feature.opening)
    if feature.cell(protocol, model).startswith("yes"):
        await feature.case(talk)
        return
    with pytest.raises(Unsupported):
        await feature.case(talk)


def test_the_table_in_the_documents_is_what_the_cases_say() -> None:
    assert written() == table(), "write it: python tests/gateway/conformance/conformance_table.py"


def test_every_case_has_a_name_of_its_own_and_every_cell_a_word() -> None:
    names = [feature.case.__name__ for feature in features()]
    assert len(set(names)) == len(names) and len(CASES) == 4
    words = {cell.partition(":")[0].partition(" ")[0] for each in features() for cell in each.cells.values()}
    assert words <= {"yes", "no", "n.a."}
    assert {protocol for each in features() for protocol, _ in each.runs()} == set(PROTOCOLS)
