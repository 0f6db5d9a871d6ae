# SPDX-License-Identifier: Apache-2.0
"""The ``afd`` command. Exit codes: 0 done, 1 the check found a difference, 2 refused, 3 a process failed, 4 a bug.

``afd ffn`` is a service: 0 stopped, 1 a fatal error, 2 refused. ``afd doctor``: 0, or 1 where a check failed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError:
    sys.exit("afd: this command needs more than the kernels; install it with: pip install 'afd[transformers]'")

from afd_runtime.bench.cli import app as bench_app

EXIT_MISMATCH, EXIT_REFUSED, EXIT_FAILED, EXIT_BUG, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
EXIT_FATAL = 1

app = typer.Typer(
    name="afd",
    help="Mixture-of-Experts inference with attention and experts in separate processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


class Placement(str, Enum):
    """Where experts live: each FFN rank holds a block of them, or all."""

    sharded = "sharded"
    replicated = "replicated"


Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a checkpoint.", show_default=False)]
AttentionRanks = Annotated[int, typer.Option("--attention-ranks", min=1, help="Number of attention ranks.")]
FFNRanks = Annotated[int, typer.Option("--ffn-ranks", min=1, help="Number of FFN ranks.")]
PlacementOption = Annotated[
    Placement, typer.Option(help="sharded: each FFN rank holds a block of the experts; replicated: all of them.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:INDEX; the same for all ranks.")]
DType = Annotated[str, typer.Option("--dtype", help="auto (as the checkpoint), float32, float16 or bfloat16.")]
MaxBatchTokens = Annotated[
    int,
    typer.Option("--max-batch-tokens", min=1, help="Most rows of one step of an attention rank; the same everywhere."),
]
Doorbells = Annotated[
    bool | None,
    typer.Option(
        "--doorbells/--no-doorbells",
        help="For ranks that share a GPU; the same for all ranks. Default: where the host has one GPU.",
        show_default=False,
    ),
]
KernelCounts = Annotated[Path | None, typer.Option("--kernel-counts", hidden=True)]
Events = Annotated[bool, typer.Option("--events", hidden=True)]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable. Needs a tokenizer.")] = None,
    prompt_ids: Annotated[list[str] | None, typer.Option(help="Token ids, as in 1,2,3; repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens for each prompt.")] = 32,
    attention_ranks: AttentionRanks = 1,
    ffn_ranks: FFNRanks = 1,
    placement: PlacementOption = Placement.sharded,
    device: Device = "cpu",
    dtype: DType = "auto",
    max_batch_tokens: MaxBatchTokens = 2048,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Control port; 0: a free one.")] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare with the undivided model: the logits of each position in float32, which is then the default, "
            "the output of each exchanged layer in float16 and bfloat16. Exit 1 on a mismatch.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what the processes write to stderr.")] = False,
) -> None:
    """Start all ranks of MODEL on this host, generate greedily, stop them again."""
    from afd_runtime.generate import GenerateRequest
    from afd_runtime.workers import Prompt

    prompts = [Prompt(text=text) for text in prompt or []] + [Prompt(ids=parse_ids(ids)) for ids in prompt_ids or []]
    request = GenerateRequest(
        model=model,
        prompts=tuple(prompts),
        max_new_tokens=max_new_tokens,
        num_attention_ranks=attention_ranks,
        num_ffn_ranks=ffn_ranks,
        placement=placement.value,
        device=device,
        dtype=dtype,
        max_batch_tokens=max_batch_tokens,
        port=port,
        check=check,
        verbose=verbose,
    )
    _run_generate(request, as_json)


@app.command()
def ffn(
    model: Model,
    ffn_rank: Annotated[int, typer.Option("--ffn-rank", min=0, help="Which FFN rank this process is.")] = 0,
    ffn_ranks: FFNRanks = 1,
    attention_ranks: AttentionRanks = 1,
    host: Annotated[
        str, typer.Option(help="Control address of FFN rank 0. Off loopback AFD_TOKEN is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Control port of FFN rank 0.")] = 29650,
    placement: PlacementOption = Placement.sharded,
    device: Device = "cpu",
    dtype: DType = "auto",
    max_batch_tokens: MaxBatchTokens = 2048,
    doorbells: Doorbells = None,
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65535, help="Port of /health, /ready and /metrics; 0: none.")
    ] = 0,
    http_host: Annotated[str, typer.Option(help="Address of --http-port. Its pages ask for no token.")] = "127.0.0.1",
    kernel_counts: KernelCounts = None,
    events: Events = False,
) -> None:
    """Serve one FFN rank of MODEL until it is stopped. Ranks may start in any order; no engine is needed."""
    import torch

    from afd_runtime.config import AFDConfig
    from afd_runtime.progress import open_display
    from afd_runtime.workers import refuse_device, serve_ffn_rank

    refuse_device(device)
    _configure_logging()
    config = AFDConfig(
        role="ffn",
        host=host,
        port=port,
        num_attention_ranks=attention_ranks,
        num_ffn_ranks=ffn_ranks,
        placement=placement.value,
        max_batch_tokens=max_batch_tokens,
        doorbells=doorbells,
    )
    with _fatal_errors(), _http_pages(ffn_rank, http_host, http_port) as probe, open_display(events=events) as display:
        on = torch.device(device)
        serve_ffn_rank(
            model, config, ffn_rank, device=on, dtype=dtype, display=display, counts_path=kernel_counts, probe=probe
        )


@app.command()
def doctor(
    host: Annotated[str, typer.Option(help="Control address of FFN rank 0, as for afd ffn.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Control port of FFN rank 0.")] = 29650,
    kernels: Annotated[bool, typer.Option("--kernels", help="Run every operation once and check it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this host and environment: one line a check, and what to do. Exit 1 if one failed."""
    import json

    from afd_runtime.doctor import Options, as_json_object, diagnose, has_failed

    findings = diagnose(Options(host, port, kernels))
    if as_json:
        print(json.dumps(as_json_object(findings), indent=2))
    else:
        print("\n".join(finding.line() for finding in findings))
    if has_failed(findings):
        raise typer.Exit(EXIT_FATAL)


@app.command("attention-worker", hidden=True)
def attention_worker(job: Path) -> None:
    """One attention rank of ``afd generate``; JOB is the file that it wrote."""
    import msgspec

    from afd_runtime.progress import open_display
    from afd_runtime.workers import AttentionJob, run_attention_rank

    _configure_logging()
    with open_display(events=True) as display:
        run_attention_rank(msgspec.json.decode(job.read_bytes(), type=AttentionJob), display=display)


def parse_ids(text: str) -> tuple[int, ...]:
    """``"1, 2,3"`` as token ids. Raises ``typer.BadParameter``."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise typer.BadParameter(f"--prompt-ids is {text!r}; allowed: whole numbers, as in 1,2,3") from None


def main() -> None:
    """Entry point: turns the project's own errors into one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        code = exit_code(error)
        if code is None:
            traceback.print_exc()
        _end(describe(error), code or EXIT_BUG)


def exit_code(error: Exception) -> int | None:
    """The exit code for an error that is not a bug of this project, else None."""
    import pydantic

    from afd_runtime.checkpoint import ModelError
    from afd_runtime.errors import AFDConfigError, AFDError, AFDRefusedError
    from afd_runtime.launch import ChildFailed

    if isinstance(error, (ModelError, AFDConfigError, AFDRefusedError, pydantic.ValidationError)):
        return EXIT_REFUSED
    return EXIT_FAILED if isinstance(error, (ChildFailed, AFDError)) else None


def describe(error: Exception) -> str:
    """The error as its user should read it."""
    import pydantic

    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    return "; ".join(_describe_field(item) for item in error.errors())


def _describe_field(item: Any) -> str:
    message = item["msg"].removeprefix("Value error, ")
    where = ".".join(map(str, item["loc"]))
    return f"{where} is {item['input']!r}: {message}" if where else message


def _run_generate(request: Any, as_json: bool) -> None:
    from rich.console import Console

    from afd_runtime.generate import generate as run
    from afd_runtime.progress import open_display
    from afd_runtime.summary import print_report, report_json

    with open_display() as display:
        report = run(request, display)
    if as_json:
        print(report_json(report))
    else:
        print_report(report, Console())
    if report.check is not None and not report.check.ok:
        raise typer.Exit(EXIT_MISMATCH)


@contextlib.contextmanager
def _http_pages(ffn_rank: int, host: str, port: int) -> Iterator[Any]:
    """Yields the ``RankProbe`` behind the pages of this process, or None for port 0."""
    if port == 0:
        yield None
        return
    from afd_runtime.http_probe import ProbeServer, RankProbe

    probe = RankProbe(f"FFN rank {ffn_rank}")
    server = ProbeServer(probe, host, port).start()
    try:
        yield probe
    finally:
        server.close()


@contextlib.contextmanager
def _fatal_errors() -> Iterator[None]:
    """Ends a service that failed: the cause in one line, the last on stderr, then exit code 1.

    Nothing runs after that line: freeing GPU memory would wait for a kernel that does not end, or raise once more.
    """
    from afd_runtime import envs
    from afd_runtime.errors import one_line

    try:
        yield
    except Exception as error:
        if exit_code(error) == EXIT_REFUSED:
            raise
        if envs.AFD_LOG_LEVEL.get() == "DEBUG":
            traceback.print_exc()
        sys.stdout.flush()
        print(f"afd: {one_line(error)}", file=sys.stderr, flush=True)
        os._exit(EXIT_FATAL)


def _configure_logging() -> None:
    import logging

    from afd_runtime import envs

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afd_runtime").setLevel(envs.AFD_LOG_LEVEL.get())


def _end(message: str, code: int) -> None:
    print(f"afd: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
