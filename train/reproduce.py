"""Compare drafts of a target: ``python -m train.reproduce runs/small --json study.json``.

The folder holds what ``--config=small_scale`` makes: ``target/target``, ``corpus`` and a
run ``NAME-SEED`` for every draft. Of each draft are measured, and kept in its folder as
``study.json``: its training curve; loss and agreement with the target on held-out rows whose
context is cut to several lengths, the same tokens each time; the same over tokens that are copies
of earlier ones; and tokens per target pass in real decoding. Of the target: how much it attends to
the first positions, and what its loss becomes where all others move. Several calls with different
``--drafts`` may share the work; the last one, without, gathers. Several studies, of other targets
perhaps, are compared together where their files stand in the folder's place. The exit status is 0,
or 2 for bad input.
"""

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from longspec_jax import LongSpec, files
from longspec_jax.compilation import keep_programs
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.loading import load_drafts
from longspec_jax.provenance import provenance

from .data.corpus import tokens_file
from .study.anchors import attention_to_anchors, losses_at_offset
from .study.measures import Setting, measured_decoding, measured_scores, training_curve
from .study.summary import Study, summary
from .study.tokens import cut, held_out_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    try:
        studies = _studies(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(studies, arguments.baseline))
    return 0


def _studies(arguments: argparse.Namespace) -> list[Study]:
    """What is compared: finished studies, or the one that is made now."""
    paths: list[Path] = arguments.source
    if all(path.is_file() for path in paths):
        if arguments.json:
            raise ValueError(f"--json keeps what is measured, and {paths[0]} is finished")
        return [_finished(path) for path in paths]
    if len(paths) > 1:
        raise ValueError("name one folder to measure, or files of finished studies")
    study = run(arguments, paths[0])
    if arguments.json:
        files.replace(arguments.json, f"{json.dumps(study)}\n".encode())
    return [study]


def _finished(path: Path) -> Study:
    """A study that ``--json`` has written."""
    try:
        study = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not (isinstance(study, dict) and study.get("drafts") and "target" in study):
        raise ValueError(f"{path} holds no study; name a file that --json has written")
    return study


def run(arguments: argparse.Namespace, folder: Path) -> Study:
    """Measure what is not measured yet in a folder, and gather all."""
    keep_programs()
    runs = {
        path.parent.parent.name: path.parent.parent
        for path in sorted(folder.glob("*-*/draft/config.json"))
    }
    patterns = arguments.drafts.split(",")
    chosen = [name for name in runs if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if not chosen:
        raise ValueError(
            f"{folder} has no run that matches --drafts={arguments.drafts}; its runs are "
            f"{', '.join(runs) or 'none'}, made with --workdir={folder}/NAME-SEED"
        )
    model = LongSpec.from_pretrained(folder / "target" / "target", dtype=arguments.dtype)
    setting = _setting(arguments, folder, model)
    target = _once(folder / "target" / "study.json", lambda: _of_target(arguments, setting, model))
    for name in chosen:
        _once(runs[name] / "study.json", lambda path=runs[name]: _of_draft(setting, model, path))
    done = {name: path / "study.json" for name, path in runs.items()}
    return {
        **provenance(jax.devices()[0].device_kind),
        "setting": {key: value for key, value in asdict(setting).items() if key != "rows"},
        "rows": len(setting.rows),
        "target": target,
        "drafts": {n: json.loads(p.read_text()) for n, p in done.items() if p.is_file()},
    }


def _setting(arguments: argparse.Namespace, folder: Path, model: LongSpec) -> Setting:
    contexts = tuple(sorted(arguments.contexts))
    begin = model.tokenizer.bos_token_id
    path = tokens_file(folder / "corpus", "heldout", folder / "target/target")
    return Setting(
        held_out_rows(path, contexts[-1], arguments.rows, begin),
        begin,
        contexts,
        arguments.last,
        arguments.shifts,
        arguments.near,
        arguments.tree,
        arguments.new_tokens,
    )


def _of_target(arguments: argparse.Namespace, setting: Setting, model: LongSpec) -> dict[str, Any]:
    config, params = model.target_config, model.target_params
    short = cut(setting.rows, min(setting.contexts[-1], arguments.short), setting.begin)
    offset = config.max_positions - short.shape[1]
    return {
        "attention_to_anchors": attention_to_anchors(config, params, setting.rows),
        "offset": offset,
        "losses": losses_at_offset(config, params, short, offset),
    }


def _of_draft(setting: Setting, model: LongSpec, path: Path) -> dict[str, Any]:
    target = Target(model.target_config, model.target_params, model.tokenizer)
    [draft] = load_drafts([path / "draft"], target, {})
    if not isinstance(draft, LongSpecDraft):
        raise ValueError(f"{path / 'draft'} is no LongSpec draft; measure what train.run has made")
    return {
        "curve": training_curve(path / "metrics.jsonl"),
        "scores": measured_scores(setting, target, draft),
        "decoding": measured_decoding(setting, replace(model, draft=draft)),
    }


def _once(path: Path, make: Any) -> Any:
    """What a file says, after it was made if it is not there."""
    if not path.is_file():
        files.replace(path, json.dumps(make()).encode())
    return json.loads(path.read_text())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        type=Path,
        nargs="+",
        help="the folder of target, corpus and runs, or files of finished studies",
    )
    add("--drafts", default="*", help="runs to measure, such as plain-1,*-2 (default: all)")
    add("--baseline", default="plain", help="variant that others are compared with")
    add("--json", type=Path, help="write all figures to this file")
    add("--rows", type=int, default=64, help="held-out rows (default: 64)")
    add(
        "--contexts",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[512, 2048, 8192, 16000],
        help="lengths that contexts are cut to (default: 512,2048,8192,16000)",
    )
    add("--last", type=int, default=256, help="tokens scored at the end of a row (default: 256)")
    add("--short", type=int, default=1024, help="tokens of rows at offset positions")
    add("--shifts", type=int, default=5, help="distances from the target's last key (default: 5)")
    add("--near", type=int, default=4096, help="most tokens back that a copy is near")
    add("--tree", default="4,16,16,16,16@64", help="tree of the decoding")
    add("--new_tokens", type=int, default=64, help="decoded for every row (default: 64)")
    add("--dtype", default="auto", help="of the target and its drafts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
