"""The `quire` command: flags in, one function call out. Every refusal is one line that says what is allowed.

It must not know how anything works. Exit status: 0; 2 when the command line, a setting, the model or a request is
wrong, 1 when trying again may help; 130 when interrupted, 141 when nobody reads the output.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from ..common.errors import QuireError
from ..common.settings import Settings, resolve_settings
from ..common.types import SamplingParams
from ..model import describe_sizes
from ..tools.loadtest import ClientBehaviour, DatasetOptions, LoadOptions, Pacing, SamplingOptions, TargetOptions
from ..tools.simulation import Process, Workload
from .bench import bench_cache, bench_speed
from .demo import demo as run_demo
from .generate import generate as run_generate
from .inspect import info_text, plan_text
from .loadtest import LoadTest, OutputOptions
from .loadtest import loadtest as run_loadtest
from .serve import serve as run_serve
from .simulate import simulate as run_simulate
from .token import token_text

app = App(
    name="quire",
    help="Serve language models on CPUs from paged KV memory: the same bits under any load.",
    version_flags=["--version"],
)


@Parameter(name="*", group="Model and memory")
@dataclass
class EngineFlags:
    """Flags win over QUIRE_* environment variables, those over --config, that over defaults."""

    weights: str | None = None
    "bf16, q8 (quantised at load) or f32. Default bf16."
    kv_cache_dtype: str | None = None
    "bf16, f32 or int8. Default bf16."
    page_size: Annotated[int | None, Parameter(name=("--page-size", "--block-size"))] = None
    "Tokens per KV page: 16, 32 or 64. Default 32."
    max_model_len: int | None = None
    "Longest prompt + output, in tokens. Default: the model's, or what the pool holds."
    max_num_seqs: int | None = None
    "Sequences that run at once. Default 64."
    max_num_batched_tokens: int | None = None
    "Tokens computed in one step. Default 512."
    kv_cache_memory: str | None = None
    "KV pool size, such as 4GiB. Default: what max_num_seqs need, up to 40 % of free memory."
    threads: int | None = None
    "Default: what affinity and cgroup quota allow."
    enable_prefix_caching: bool | None = None
    "Share pages of equal prompt beginnings. Default on."
    isa: str | None = None
    "Force an ISA level; see `quire info`."
    config: Path | None = None
    "TOML file with any of these settings."


@Parameter(name="*", group="Scheduling")
@dataclass
class SchedulingFlags:
    max_num_waiting: int | None = None
    "Queue limit. Default 1024."
    max_num_waiting_per_tenant: int | None = None
    "Queue limit of one tenant. Default: none."
    scheduling_policy: str | None = None
    "Who is admitted next: fcfs, priority (with ageing) or fair (least served tenant first). Default fcfs."
    tenant_weights: str | None = None
    "Shares of tenants under fair, such as a=2,b=0.5; 1 for those not named."
    max_kv_share_per_tenant: float | None = None
    "Most of the KV pages that one tenant's requests may hold, 0 to 1. Default: all."
    itl_target_ms: float | None = None
    """Keep the time between a stream's tokens below this: less prefill per step, and only as many at once as can decode
    in that time. Default: most throughput."""
    num_speculative_tokens: int | None = None
    "Guess up to so many tokens per step from earlier text; never changes the output. Default 0: off."
    kv_spill_size: str | None = None
    "Disk space for the pages of preempted requests, such as 8GiB. Default 0: their pages are recomputed."
    kv_spill_dir: str | None = None
    "Where that file is. Default: the folder for temporary files."


@Parameter(name="*", group="Server")
@dataclass
class ServerFlags:
    host: str | None = None
    "Address for clients. Default 127.0.0.1; another one needs --token or --auth-tokens."
    port: int | None = None
    "Default 7070; 0 takes a free one."
    uds: str | None = None
    "Unix socket path for clients, instead of TCP."
    http_host: str | None = None
    "Address for operators. Default 127.0.0.1."
    http_port: int | None = None
    "Default 7071; 0 takes a free one."
    token: str | None = None
    "Clients must present it. Better set QUIRE_TOKEN: flags show in process lists."
    auth_tokens: Path | None = None
    "TOML file of tenants, the hashes of their keys and their limits; `quire token` makes keys."
    tls_cert: Path | None = None
    "PEM certificate chain; with it clients speak TLS."
    tls_key: Path | None = None
    "Its private key."
    served_model_name: str | None = None
    "Name that clients are told."
    shutdown_timeout: float | None = None
    "Seconds that accepted requests have to end after SIGTERM. Default 30."
    in_process: bool | None = None
    "Run the engine in the server's own process. Default off: nothing survives its crash then."
    engine_processes: int | None = None
    "Engine processes, each with a copy of the model. Default 0: one per NUMA node."
    metrics_compat: str | None = None
    "vllm: serve the metrics under vLLM's names too."
    log_format: str | None = None
    "console or json. Default console."
    log_level: str | None = None
    "debug, info, warning or error. Default info."
    prefix_snapshot: str | None = None
    "File that keeps the prefix cache over a restart: read at start, written at the end."


@Parameter(name="*", group="Sampling")
@dataclass
class SamplingFlags:
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    "Choices. Several are printed one after another once they have ended."
    best_of: int | None = None
    "Draw so many and print the n likeliest."
    beam_width: int = 0
    "Search so many beams and print the n best; needs temperature 0."
    length_penalty: float = 1.0
    "Of beams: above 1 favours longer ones."


@Parameter(name="*", group="Workload")
@dataclass
class WorkloadFlags:
    arrivals: Process = "poisson"
    "poisson, bursty, constant, or a recorded trace: mooncake (JSONL), azure (CSV)."
    trace: Path | None = None
    "The file of a recorded trace."
    rate: float | None = None
    "Requests per second. Default 1, or as recorded."
    requests: int | None = None
    "How many. Default 500, or all recorded."
    burstiness: float = 0.25
    "Of bursty arrivals: the gamma distribution's shape; 1 is Poisson, less comes in bursts."
    prompt_tokens: str = "512"
    "512, a range 64-1024, or lognormal:MEDIAN,SIGMA."
    output_tokens: str = "128"
    "Likewise."
    shared_prefix_tokens: int = 0
    "Tokens before each prompt that are the same for all requests of a tenant."
    tenants: str | None = None
    "Relative rates, such as a=20,b=1."
    deadline_ms: float | None = None
    "Of every request, for all of it. Default: none."
    seed: int = 1


@Parameter(name="*", group="Machine")
@dataclass
class MachineFlags:
    bandwidth: float | None = None
    "GB/s read from memory. Default: this machine's, measured now."
    peak: float | None = None
    "int8 GOP/s. Default: this machine's, measured now."
    noise: float = 0.0
    "Sigma of a lognormal factor on every step's time."


def _settings(model: str | None, *flags: EngineFlags | SchedulingFlags | ServerFlags | None) -> Settings:
    given: dict[str, Any] = {"model": model}
    for group in flags:
        given |= asdict(group) if group is not None else {}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    config_file = given.pop("config", None)
    return resolve_settings(given, os.environ, config_file)


@app.command
def serve(
    model: str | None = None,
    /,
    *,
    engine: EngineFlags | None = None,
    scheduling: SchedulingFlags | None = None,
    server: ServerFlags | None = None,
) -> None:
    """Serve MODEL, a Hugging Face folder (default: the bundled model), until interrupted."""
    run_serve(_settings(model, engine, scheduling, server))


@app.command
def generate(
    prompt: str,
    /,
    *,
    model: str | None = None,
    sampling: SamplingFlags | None = None,
    engine: EngineFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Continue PROMPT in this process and print the text as it comes."""
    params = SamplingParams(**asdict(sampling or SamplingFlags()))
    run_generate(_settings(model, engine, scheduling).engine, prompt, params)


@app.command
def demo(*, users: int = 8, max_tokens: int = 120) -> None:
    """Start a server on the bundled model, let several users stream from it at once, show what they saw, stop."""
    run_demo(users, max_tokens)


@app.command
def bench(
    model: str | None = None,
    /,
    *,
    shapes: str = "1x128,8x128,32x128",
    new_tokens: int = 32,
    repeats: int = 3,
    json: bool = False,
    kv_cache: Annotated[bool, Parameter(negative="--no-kv-cache")] = True,
    plot: Path | None = None,
    engine: EngineFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Measure prefill and decode of MODEL (default: the bundled one) by users x prompt tokens, beside what the machine
    can do at most; --plot FILE draws that as a roofline.

    With --no-kv-cache: generate by recomputing everything, beside the cached run; --plot FILE draws both.
    """
    config = _settings(model, engine, scheduling).engine
    if kv_cache:
        bench_speed(config, shapes, new_tokens, repeats, json, plot)
    else:
        bench_cache(config, shapes, new_tokens, json, plot)


@app.command
def simulate(
    model: str | None = None,
    /,
    *,
    workload: WorkloadFlags | None = None,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = (),
    json: bool = False,
    machine: MachineFlags | None = None,
    engine: EngineFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Tell what to expect of serving MODEL (default: the bundled one) to a stream of users: the real scheduler and
    pager in virtual time. Nothing is loaded, config.json is enough.

    --goodput ttft:2000 itl:200: milliseconds that a good request keeps to; of ttft, tpot, itl and e2el.
    """
    run_simulate(
        _settings(model, engine, scheduling).engine,
        Workload(**asdict(workload or WorkloadFlags())),
        goodput,
        json,
        **asdict(machine or MachineFlags()),
    )


@app.command
def loadtest(
    *,
    target: Annotated[TargetOptions | None, Parameter(name="*", group="Server under load", negative="")] = None,
    dataset: Annotated[DatasetOptions | None, Parameter(name="*", group="Requests", negative="")] = None,
    pacing: Annotated[Pacing | None, Parameter(name="*", group="When they are sent")] = None,
    behaviour: Annotated[ClientBehaviour | None, Parameter(name="*", group="How clients behave")] = None,
    sampling: Annotated[SamplingOptions | None, Parameter(name="*", group="Sampling", negative="")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*", group="Results", negative="")] = None,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", group="Results")] = (),
    metadata: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", group="Results")] = (),
) -> None:
    """Put a server under load and tell what its users saw, with the flags and result keys of `vllm bench serve`.

    Without an address a server on the bundled model is started for the duration. --goodput ttft:2000 tpot:200:
    milliseconds that a good request keeps to; of ttft, tpot and e2el. --metadata KEY=VALUE: goes into the result.
    """
    load = LoadOptions(
        dataset=dataset or DatasetOptions(), pacing=pacing or Pacing(), behaviour=behaviour or ClientBehaviour()
    )
    run_loadtest(
        LoadTest(
            target=target or TargetOptions(),
            sampling=sampling or SamplingOptions(),
            load=load,
            output=output or OutputOptions(),
            goodput=goodput,
            metadata=metadata,
        )
    )


@app.command
def plan(
    model: str | None = None, /, *, sizes: bool = False, arena: bool = False, engine: EngineFlags | None = None
) -> None:
    """Print the memory that serving MODEL takes, without loading it.

    --sizes: KV bytes of known models instead. --arena: also the map of the step arena.
    """
    print(describe_sizes() if sizes else plan_text(_settings(model, engine).engine, arena))


@app.command
def token(tenant: str, /) -> None:
    """Make a key for TENANT and print it, with the lines that admit it for `quire serve --auth-tokens FILE`."""
    print(token_text(tenant))


@app.command
def info(*, engine: EngineFlags | None = None) -> None:
    """Print versions, the ISA level and the number of threads, and why."""
    print(info_text(_settings(None, engine)))


def main() -> None:
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except (QuireError, CycloptsError) as error:
        print(f"quire: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, QuireError) and error.retryable else 2) from None
    except BrokenPipeError:  # whoever read our output has left; nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
