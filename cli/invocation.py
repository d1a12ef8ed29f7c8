"""How the user calls this command, for advice that can be pasted into the same shell."""

import shutil
import sys
from pathlib import Path


def command() -> str:
    """`vertumnus` where the shell finds it, else the path that it was called by."""
    called, found = Path(sys.argv[0]), shutil.which("vertumnus")
    if not called.is_file() or (found and called.samefile(found)):
        return "vertumnus"
    return str(called)
