"""Action of forge doctor; forge/cli/doctor.py declares it."""

import json

from forge.debug import doctor


def show(as_json: bool) -> int:
    findings = doctor.examine()
    print(json.dumps(doctor.as_json(findings), indent=1) if as_json else doctor.show(findings))
    return 1 if any(each.state == "problem" for each in findings) else 0
