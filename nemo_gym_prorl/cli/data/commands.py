# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands ``prorl data``: convert published datasets into rows, and build the search index of ``prorl_stem``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_gym_prorl.cli.image.commands import parse_pairs


data_app = typer.Typer(
    name="data", help="Convert published datasets into rows of an environment.", no_args_is_help=True
)
Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", dir_okay=False, help="File of the dataset: .jsonl, .jsonl.gz, .json, .parquet or .csv."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="JSONL file for the rows. Default: standard output.")
]
DataSource = Annotated[
    str | None,
    typer.Option(
        help="Field `data_source` of all rows, which selects their environment in a mixture. Default: one that "
        "prorl_mixture knows."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Write nothing; print counts of kept and dropped records, and two rows.")
]


@data_app.command("math")
def math(file: Source, output: Output = None, data_source: DataSource = None, dry_run: DryRun = False) -> None:
    """Convert math problems with an answer: DAPO, NuminaMath, GSM8K, MATH and others.

    Exit code 1 if a record is malformed. The page of each environment in docs/environments lists its datasets.
    """
    from nemo_gym_prorl.tasks import require_extras

    require_extras("math")  # before the next import, which would fail with a traceback
    from nemo_gym_prorl.tasks.math.task import require_readable_answers, row_of

    with require_readable_answers(row_of) as readable_row_of:
        _convert(file, output, readable_row_of, data_source, dry_run)


@data_app.command("stem")
def stem(file: Source, output: Output = None, data_source: DataSource = None, dry_run: DryRun = False) -> None:
    """Convert science questions: GPQA, MMLU-Pro, SCP-116K and others.

    Exit code 1 if a record is malformed. The page of each environment in docs/environments lists its datasets.
    """
    from nemo_gym_prorl.tasks import require_extras

    require_extras("stem")
    from nemo_gym_prorl.tasks.stem.problems import AnswerKind, problem_of, row_of

    judged = set[int]()

    def counted_row_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
        row = row_of(record)
        if problem_of(row).kind is AnswerKind.TEXT:
            judged.add(hash((row["question"], row["expected_answer"])))
        return row

    try:
        _convert(file, output, counted_row_of, data_source, dry_run)
    finally:
        if judged:
            typer.echo(f"{len(judged)} of them have a free-text answer and need judge_model_server", err=True)


@data_app.command("index")
def index(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            exists=True,
            dir_okay=False,
            help="Files of the corpus: records with `text`, `title` and `url` (.jsonl, .json, .parquet), or plain "
            "texts (.txt, .md).",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the index.")],
) -> None:
    """Build an offline search index for the tool `search` of prorl_stem."""
    from nemo_gym_prorl.cli.data.convert import make_index

    make_index(files, output)


@data_app.command("code")
def code(
    file: Source,
    output: Output = None,
    tests_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which each problem's tests become a file that the row names. Default: tests in the row."
        ),
    ] = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Convert programming problems with tests: LiveCodeBench, DeepCoder, TACO, MBPP and others.

    Exit code 1 if a record is malformed. The page of each environment in docs/environments lists its datasets.
    """
    from nemo_gym_prorl.tasks.code.convert import row_of

    _convert(
        file,
        output,
        partial(row_of, tests_folder=None if dry_run else tests_folder),
        data_source,
        dry_run,
    )


@data_app.command("swe")
def swe(
    file: Source,
    dataset: Annotated[str, typer.Option(help="Format of the records: swe-bench, swe-gym, swe-rebench or r2e-gym.")],
    images: Annotated[
        str | None, typer.Option(help="Registry and path prefix of the images. Default: the dataset's own.")
    ] = None,
    output: Output = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Convert repository issues with hidden tests: SWE-bench, SWE-Gym, SWE-rebench, R2E-Gym.

    `prorl image build-all ROWS` pulls the rows' images. Exit code 1 if a record is malformed.
    The page of each environment in docs/environments lists its datasets.
    """
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.images.reference import parse_registry
    from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS

    if dataset not in CONVERTERS:
        raise CallerError(f"must be one of {', '.join(CONVERTERS)}, not {dataset!r}", field="--dataset")
    prefix = images.rstrip("/") if images else None

    def row_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
        row = CONVERTERS[dataset](record, prefix)
        parse_registry(row["image"])  # refuses the record if the image is no valid reference
        return row

    _convert(file, output, row_of, data_source, dry_run)


@data_app.command("harbor")
def harbor(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A task's folder, a folder of such folders, a registry .json, a .parquet of packed tasks, or "
            "GIT-URL@REF[#FOLDER].",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="NAME or NAME@VERSION of the data set in a registry. Default: the only one.")
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(help="IMAGE=BASE: use BASE where a task or its Dockerfile names IMAGE; repeatable."),
    ] = None,
    force_build: Annotated[
        bool, typer.Option("--force-build", help="Build a task's Dockerfile although it names a docker_image.")
    ] = False,
    output: Output = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Convert folders of Harbor tasks.

    `prorl image build-all ROWS` makes the rows' images. Exit code 1 if a task is refused.
    docs/environments/harbor.md lists the features without support.
    """
    from nemo_gym_prorl.cli.data.convert import convert_harbor

    if not convert_harbor(
        source,
        output,
        name=name,
        replaced=parse_pairs("--replace", replace),
        force_build=force_build,
        data_source=data_source,
        dry_run=dry_run,
    ):
        raise typer.Exit(1)


def _convert(
    file: Path,
    output: Path | None,
    row_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    data_source: str | None,
    dry_run: bool,
) -> None:
    from nemo_gym_prorl.cli.data.convert import convert

    if not convert(file, output, row_of, data_source, dry_run=dry_run):
        raise typer.Exit(1)
