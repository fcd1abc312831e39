"""Sources that are broken on purpose."""

import ast


def broken(source: str, old: str, new: str) -> str:
    """`source` with another text in its code.

    Raises:
      LookupError: the code does not have that text: an error that no test takes for a kernel that fails.
    """
    changed = source.replace(old, new)
    if not old or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        raise LookupError(f"no kernel is broken, since the code does not have {old!r}: name what stands there now")
    return changed
