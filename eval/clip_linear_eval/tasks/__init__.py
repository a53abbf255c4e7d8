"""Task files: data sets with their names and templates under a name, and groups of them, in TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_linear.errors import UserError, unknown

_KEYS = ("version", "dataset", "type", "classnames", "templates", "labels", "restrict", "split")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One data set to evaluate on; fields that are None are left to the command's flags and to the set's own files."""

    name: str | None  # what rows call it; None: as the data set calls itself
    dataset: str
    version: int | None = None
    type: str | None = None
    classnames: str | None = None
    templates: str | None = None
    labels: str | None = None
    restrict: bool | None = None
    split: str | None = None


def find_tasks(wanted: list[str], files: list[str], data_root: Path) -> list[Task]:
    """The tasks that ``--dataset`` names: paths, task names and groups, each once, in order.

    Built-in tasks lie below ``data_root``; those of ``files`` beside their file. Raises UserError for unknown names.
    """
    tasks: dict[str, Task] = {}
    groups: dict[str, list[str]] = {}
    built_in = sorted(Path(__file__).parent.glob("*.toml"))
    for path, root in [*((p, data_root) for p in built_in), *((Path(f), Path(f).parent) for f in files)]:
        _read(path, root, tasks, groups)
    out: dict[str, Task] = {}
    for name in wanted:
        for task in _named(name, tasks, groups, ()):
            out.setdefault(task.name or task.dataset, task)
    return list(out.values())


def _named(name: str, tasks: dict[str, Task], groups: dict[str, list[str]], above: tuple[str, ...]) -> list[Task]:
    if name in above:
        raise UserError(f"task group {name!r} contains itself ({' → '.join((*above, name))})")
    if not above and Path(name).exists():
        return [Task(name=None, dataset=name)]
    if name in tasks:
        return [tasks[name]]
    if name in groups:
        return [task for member in groups[name] for task in _named(member, tasks, groups, (*above, name))]
    if "/" in name or "." in name:
        raise UserError(f"dataset {name!r} does not exist; give a path, or a task: {', '.join(sorted(tasks))}")
    raise unknown("dataset", name, [*tasks, *groups], "give the path of a data set, a task or a group")


def _read(path: Path, root: Path, tasks: dict[str, Task], groups: dict[str, list[str]]) -> None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"task file {str(path)!r} does not exist") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"task file {str(path)!r} is not valid TOML ({error})") from None
    strange = [key for key in content if key not in ("tasks", "groups")]
    if strange:
        raise unknown(
            f"table in {path.name}", strange[0], ("tasks", "groups"), "a task file has [tasks.NAME] and [groups]"
        )
    for name, fields in content.get("tasks", {}).items():
        tasks[name] = _task(name, fields, path, root)
    groups |= content.get("groups", {})


def _task(name: str, fields: dict[str, Any], path: Path, root: Path) -> Task:
    strange = [key for key in fields if key not in _KEYS]
    if strange:
        raise unknown(f"key of task {name!r}", strange[0], _KEYS, f"mend {str(path)!r}")
    if "dataset" not in fields:
        raise UserError(f"task {name!r} in {str(path)!r} has no dataset; write the path of its data")
    files: dict[str, str] = {}
    for key in ("classnames", "templates", "labels"):  # files beside the task file may be named without their folder
        if key in fields:
            files[key] = str(root / fields[key]) if (root / fields[key]).is_file() else fields[key]
    return Task(name=name, **{**fields, **files, "dataset": str(root / fields["dataset"])})
