"""The command `forge` as it is installed: --help, --version and completion answer without an import of torch.

`import forge` imports all of it and torch, which takes seconds. Here the package becomes known to Python without being
executed, so that modules of `forge.cli` are imported alone; forge/cli/app.py executes it before a command runs.
"""

import importlib.util
import sys


def main() -> int:
    if "forge" not in sys.modules:
        spec = importlib.util.find_spec("forge")
        sys.modules["forge"] = importlib.util.module_from_spec(spec)
    cli = importlib.import_module("forge.cli")
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
