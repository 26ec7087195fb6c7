"""How one of the project's commands is typed in the shell that runs this one."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def typed_command(name: str, module: str) -> str:
    """By its name where the shell finds it, else by its path beside Python, else `python -m module`."""
    script = Path(sys.executable).parent / name
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m {module}"
    found = shutil.which(name)
    if found is not None and os.path.samefile(found, script):
        return name
    return shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))
