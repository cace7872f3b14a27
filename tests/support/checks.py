"""What several files of tests use of `test_checks`."""

from pathlib import Path

from specdata.storage.files import write_json


def own(out: Path, target: dict[str, object], draft: dict[str, object]) -> list[str]:
    """A pair of one's own, of which there is nothing but config.json."""
    for name, described in (("target", target), ("draft", draft)):
        write_json(out.parent / name / "config.json", described)
    models = [f"--models.{name}={out.parent / name}" for name in ("target", "draft")]
    return [f"--output={out}", "--toy=null", *models]
