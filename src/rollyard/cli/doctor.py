"""`rollyard doctor`: what is missing on this machine, and what mends it."""

from __future__ import annotations

import argparse
import asyncio

from rollyard.cli.common import Commands, command, config_of, json_flag, to_json

NEEDED_MISSING = 3


def add(commands: Commands) -> None:
    """The command of this file."""
    doctor = command(commands, "doctor", run_doctor, "say what is missing on this machine, and what mends it")
    json_flag(doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Exit code 3 when something that is needed is missing; warnings do not count."""
    from rollyard.cli import agent, relay
    from rollyard.gateway.local_model import DEMO_MODEL_SHA256, demo_model_path
    from rollyard.pipeline.doctor import CHECKS, examine, weights_check

    checks = [*CHECKS, weights_check(demo_model_path, DEMO_MODEL_SHA256), agent.check, relay.check]
    findings = asyncio.run(examine(config_of(args), checks))
    if args.json:
        print(to_json(findings))
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            mend = f"\n{'':{width + 10}}mend: {finding.mend}" if finding.mend else ""
            print(f"{finding.status:8}{finding.check:{width}}  {finding.found}{mend}")
    return NEEDED_MISSING if any(finding.status == "missing" for finding in findings) else 0
