# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Commands ``prorl data``, ``prorl image`` and ``prorl key``: their arguments.

Each command imports its modules when it runs, so ``prorl --help`` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


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
    """Convert math problems with an answer: DAPO, NuminaMath, GSM8K, MATH, or records with `problem` and `answer`.

    Exit code 1 if a record is malformed. docs/environments.md lists the datasets.
    """
    from nemo_gym_prorl.tasks.extras import require_extras

    require_extras("math")  # before the next import, which needs the extra
    from nemo_gym_prorl.tasks.math.task import require_readable_answers, row_of

    with require_readable_answers(row_of) as readable_row_of:
        _convert(file, output, readable_row_of, data_source, dry_run)


@data_app.command("stem")
def stem(file: Source, output: Output = None, data_source: DataSource = None, dry_run: DryRun = False) -> None:
    """Convert science questions: GPQA, MMLU-Pro, SCP-116K, or records with `question` and `answer` or `options`.

    Exit code 1 if a record is malformed. docs/environments.md lists the datasets.
    """
    from nemo_gym_prorl.tasks.stem.problems import row_of

    _convert(file, output, row_of, data_source, dry_run)


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
    from nemo_gym_prorl.cli.data import make_index

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
    """Convert programming problems with tests: LiveCodeBench, DeepCoder, TACO, MBPP, rows of NeMo Gym's code_gen.

    Exit code 1 if a record is malformed. docs/environments.md lists the datasets.
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

    `prorl image pull --from ROWS` pulls the rows' images. Exit code 1 if a record is malformed.
    docs/environments.md lists the datasets.
    """
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.images.reference import parse_registry
    from nemo_gym_prorl.tasks.swe.datasets import CONVERTERS

    if dataset not in CONVERTERS:
        raise CallerError(f"must be one of {', '.join(CONVERTERS)}, not {dataset!r}", field="--dataset")
    prefix = images.rstrip("/") if images else None

    def row_of(record: Mapping[str, Any]) -> Mapping[str, Any]:
        row = CONVERTERS[dataset](record, prefix)
        parse_registry(row["image"])  # raises if the image is not a valid reference
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
        typer.Option(help="IMAGE=BASE: build on BASE where a Dockerfile says FROM IMAGE; repeatable."),
    ] = None,
    force_build: Annotated[
        bool, typer.Option("--force-build", help="Build a task's Dockerfile although it names a docker_image.")
    ] = False,
    output: Output = None,
    data_source: DataSource = None,
    dry_run: DryRun = False,
) -> None:
    """Convert folders of Harbor tasks: `task.toml`, `instruction.md`, `environment/`, `tests/`.

    `prorl image build-all ROWS` makes the rows' images. Exit code 1 if a task is refused. docs/harbor.md lists the
    features without support.
    """
    from nemo_gym_prorl.cli.data import convert_harbor

    if not convert_harbor(
        source,
        output,
        name=name,
        replaced=_pairs("--replace", replace),
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
    from nemo_gym_prorl.cli.data import convert

    if not convert(file, output, row_of, data_source, dry_run=dry_run):
        raise typer.Exit(1)


if TYPE_CHECKING:
    from nemo_gym_prorl.sandbox.images.recipe import Format

image_app = typer.Typer(name="image", help="Build, pull, list and remove sandbox images.", no_args_is_help=True)
Layout = Annotated[
    str | None,
    typer.Option("--format", help="folder or sif. Default: sif if the cache is on a shared disk, else folder."),
]


@image_app.command("build")
def build_image(
    template: Annotated[
        str,
        typer.Argument(
            help="plain, agent, or the path of a Jinja2 template for a definition file; these need --name and --base. "
            "A Dockerfile, or a folder that has one, needs --name. "
            "Without options: default, kernel or math, the images that servers use."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new image.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Base of the image: docker:// address, folder, SIF file, name of an image, or apt:."),
    ] = None,
    apt: Annotated[list[str] | None, typer.Option(help="Debian package, NAME or NAME=VERSION; repeatable.")] = None,
    pip: Annotated[list[str] | None, typer.Option(help="Python package, a requirement of pip; repeatable.")] = None,
    lock: Annotated[list[Path] | None, typer.Option(help="Lock file for the template; repeatable.")] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: variable of the template, or ARG of the Dockerfile; repeatable."),
    ] = None,
    target: Annotated[str, typer.Option(help="Stage of the Dockerfile. Default: the last one.")] = "",
    replace: Annotated[
        list[str] | None,
        typer.Option(help="IMAGE=BASE: build on BASE where the Dockerfile says FROM IMAGE; repeatable."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Rebuild the image and pull its base again.")] = False,
    layout: Layout = None,
    show: Annotated[bool, typer.Option("--show", help="Print the definition file without building.")] = False,
) -> None:
    """Build an image from a template or a Dockerfile. An existing image with the same recipe is reused."""
    from rich.console import Console

    from nemo_gym_prorl.cli.images import progress_step
    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.sandbox.dockerfile.builder import DockerfileRequest, build_dockerfile, is_dockerfile
    from nemo_gym_prorl.sandbox.images import builder as build
    from nemo_gym_prorl.sandbox.images import recipe
    from nemo_gym_prorl.sandbox.images.builder import BUILTIN_IMAGES, ensure_image
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    if name is None and base is None and template in BUILTIN_IMAGES and not show:
        with progress_step(Console(highlight=False), template) as say:
            say(str(ensure_image(template, say)))
        return
    values = _pairs("--set", variables)
    if is_dockerfile(Path(template)):
        if name is None:
            raise CallerError("is required for a Dockerfile", field="--name")
        request = DockerfileRequest(
            Path(template),
            name,
            args=values,
            target=target,
            replaced=_pairs("--replace", replace),
            fresh=fresh,
            format=_layout(layout),
        )
        with progress_step(Console(highlight=False), name) as say:
            say(str(build_dockerfile(request, ImageStore(), require_runtime(), say)))
        return
    if name is None or base is None:
        raise CallerError("is required for this template", field="--name" if name is None else "--base")
    order = build.BuildRequest(
        template,
        base,
        name,
        apt=apt or (),
        pip=pip or (),
        locks=lock or (),
        variables=values,
        fresh=fresh,
        format=_layout(layout),
    )
    store = ImageStore()
    if show:
        image_recipe = build.recipe_of(order, store)
        typer.echo(recipe.render(image_recipe.template, "Bootstrap: localimage\nFrom: BASE", image_recipe))
        return
    with progress_step(Console(highlight=False), name) as say:
        say(str(build.build(order, store, require_runtime(), say)))


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    """Return the NAME=VALUE entries of a repeatable option."""
    from nemo_gym_prorl.failures import CallerError

    pairs = [entry.partition("=") for entry in values or ()]
    if wrong := [name for name, equals, _value in pairs if not equals]:
        raise CallerError(f"must be NAME=VALUE, not {wrong[0]!r}", field=option)
    return {name: value for name, _equals, value in pairs}


@image_app.command("pull")
def pull_images(
    names: Annotated[list[str] | None, typer.Argument(help="Image addresses, with or without docker://.")] = None,
    rows: Annotated[
        Path | None, typer.Option("--from", exists=True, dir_okay=False, help="JSONL file whose rows name images.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a row with its image; dots separate nested fields.")] = "image",
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel pulls.")] = 4,
    tries: Annotated[int, typer.Option(min=1, help="Number of attempts per image.")] = 4,
    credentials: Annotated[
        bool, typer.Option("--credentials", help="Use your stored registry logins. Default: anonymous.")
    ] = False,
    layout: Layout = None,
) -> None:
    """Pull missing images. Exit code 1 if an image failed; run the command again to continue."""
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.pull import Puller
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    images = commands.images_to_pull(names or [], rows, field)
    puller = Puller(ImageStore(), require_runtime(), _layout(layout), credentials, tries)
    if not commands.pull(puller, images, jobs, Console(highlight=False)):
        raise typer.Exit(1)


@image_app.command("build-all")
def build_all_images(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", exists=True, dir_okay=False, help="JSONL file of rows.")],
    jobs: Annotated[int, typer.Option(min=1, help="Number of images that are made at a time.")] = 2,
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="Limit in GiB for all images; no further image is begun above it.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSONL file for the outcome of each image.")
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Number of attempts per pull.")] = 4,
) -> None:
    """Build or pull the missing images of all rows. Exit code 1 if an image failed; run the command again to continue.

    Rows of `prorl data harbor` have Dockerfiles, whose commands have your rights. Stages are shared between tasks.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.pull import Puller
    from nemo_gym_prorl.sandbox.images.store import ImageStore
    from nemo_gym_prorl.sandbox.runtime.apptainer import require_runtime

    console = Console(highlight=False)
    outcomes = commands.build_all(rows, Puller(ImageStore(), require_runtime(), tries=tries), jobs, max_gb, console)
    if report:
        commands.write_report(outcomes, report)
    if not commands.print_outcomes(outcomes, console):
        raise typer.Exit(1)


@image_app.command("tools")
def make_tools(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make or complete.")],
    tasks: Annotated[list[Path] | None, typer.Option(help="Folder of Harbor tasks to equip; repeatable.")] = None,
    packages: Annotated[list[str] | None, typer.Option(help="'NAME==VERSION NAME…': one set; repeatable.")] = None,
    pythons: Annotated[
        list[str] | None, typer.Option("--python", help="Version, or folder of a relocatable Python; repeatable.")
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="Build what has no wheel, which runs its code.")] = False,
) -> None:
    """Make a folder of uv, Python and wheels for tests without a network. Exit code 1 if packages can't be had."""
    from nemo_gym_prorl.cli.verifier_tools import show_tools

    if show_tools(folder, tasks or (), packages or (), pythons or (), build):
        raise typer.Exit(1)


@image_app.command("list")
def list_images() -> None:
    """List all images, and the unpacked copies on this machine."""
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.show(ImageStore(), Console(highlight=False))


@image_app.command("gc")
def collect_images(
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="Limit in GiB for images, and the same limit for unpacked copies.")
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0, help="Remove images unused for this many days.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
) -> None:
    """Remove images and unpacked copies, least recently used first, and leftovers of crashes.

    Images in use are kept.
    """
    from rich.console import Console

    from nemo_gym_prorl.cli import images as commands
    from nemo_gym_prorl.sandbox.images.store import ImageStore

    commands.collect(ImageStore(), max_gb, older_than, dry_run, Console(highlight=False))


def _layout(text: str | None) -> Format | None:
    from nemo_gym_prorl.failures import CallerError

    match text:
        case None | "folder" | "sif":
            return text
    raise CallerError(f"must be 'folder' or 'sif', not {text!r}", field="--format")


if TYPE_CHECKING:
    from nemo_gym_prorl.rollout.api.access_control import Clients

key_app = typer.Typer(
    name="key", help="Create, list and revoke the keys of a service's clients.", no_args_is_help=True
)
File = Annotated[
    Path, typer.Option("--file", dir_okay=False, help="The service's keys file (setting keys_file, --keys-file).")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the client.")]


@key_app.command()
def new(
    name: Name,
    file: File,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Permission of the client: submit, read, cancel or admin; repeatable. Default: the first three."
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of slots and sandboxes, relative to other clients' shares.")
    ] = 1.0,
) -> None:
    """Create a client and print its key. The file stores only a hash, so the key cannot be shown again.

    A running service accepts the key within a second.
    """
    from pydantic import ValidationError

    from nemo_gym_prorl.failures import CallerError
    from nemo_gym_prorl.http.problem_document import field_errors, in_words
    from nemo_gym_prorl.rollout.api.access_control import ALL_BUT_ADMIN, Client, hash_of, new_key, write_clients

    clients = _clients(file, missing_ok=True)
    if any(client.name == name for client in clients.clients):
        raise CallerError(f"client {name!r} exists already; revoke its key first", field="NAME")
    key = new_key()
    entry = {"name": name, "hash": hash_of(key), "scopes": scope or ALL_BUT_ADMIN, "share": share}
    try:
        clients.clients.append(Client.model_validate(entry))
    except ValidationError as error:
        raise CallerError(in_words(field_errors(error.errors()))) from None
    write_clients(file, clients)
    typer.echo(key)


@key_app.command("list")
def list_clients(file: File) -> None:
    """List the clients: name, share and permissions."""
    for client in _clients(file).clients:
        typer.echo(f"{client.name}\t{client.share:g}\t{','.join(client.scopes)}")


@key_app.command()
def revoke(name: Name, file: File) -> None:
    """Revoke a client's key. A running service refuses it within a second; the client's rollouts continue."""
    from nemo_gym_prorl.failures import CallerError, suggest
    from nemo_gym_prorl.rollout.api.access_control import write_clients

    clients = _clients(file)
    left = [client for client in clients.clients if client.name != name]
    if len(left) == len(clients.clients):
        raise CallerError(f"no client {name!r}{suggest(name, (client.name for client in left))}", field="NAME")
    clients.clients = left
    write_clients(file, clients)


def _clients(file: Path, *, missing_ok: bool = False) -> Clients:
    from nemo_gym_prorl.rollout.api.access_control import Clients, read_clients

    return Clients() if missing_ok and not file.exists() else read_clients(file)
