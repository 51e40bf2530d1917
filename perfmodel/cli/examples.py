"""One or two lines for each command as anyone would type them: the end of its `--help`."""

__all__ = ["EXAMPLES", "epilog_of"]

EXAMPLES: dict[str, tuple[str, ...]] = {
    "simulate": (
        "simulate llama-3.1-8b-a100 --set engine.max_num_seqs=64 --out out/",
        "simulate --model llama-3.1-8b --hardware h100 --rate '20 req/s' --ttft 1s --tpot '40 ms'",
    ),
    "execute": ("execute tiny-llama-cpu",),
    "explain": (
        "explain llama-3.1-8b-a100 --batch 32 --context 2048",
        "explain --model llama-3.1-70b --hardware h200 --prefill 4096",
    ),
    "roofline": (
        "roofline llama-3.1-8b-a100 --batch 64 --out out/",
        "roofline --model qwen3-30b-a3b --hardware h100",
    ),
    "memory": ("memory llama-3.1-70b-h100-tp4", "memory --model qwen3-30b-a3b --hardware h100"),
    "calibrate": (
        "calibrate --device cpu",
        "calibrate --from measurements/ --engine vllm --out calibrations/",
        "calibrate --from rate-*.json --engine vllm --name my-h100 --scenario llama-3.1-8b-a100",
    ),
    "validate": (
        "validate executor tiny-llama-cpu",
        "validate published workloads/scenarios/published",
        "validate bench result.json --scenario llama-3.1-8b-h100-2048-256",
    ),
    "techniques": ("techniques --family serving",),
    "quality": ("quality tiny-llama-cpu --set model=model.gguf --against engine.quantization=fp8",),
    "study": ("study autoscaling --quick", "study nodes --report nodes.html"),
    "whatif": (
        "whatif llama-3.1-8b-a100 --vary hardware.hbm.bandwidth=0.5x..2x",
        "whatif --model llama-3.1-8b --hardware h100 --vary traffic.arrivals.rate=1..16 "
        "--against engine.quantization=int8",
    ),
    "plan": (
        "plan --model llama-3.1-70b --hardware h100,h200 --rate 20 --ttft 1s --tpot 40ms --traffic chat",
        "plan llama-3.1-8b-a100 --set plan.objective=fewest_gpus --report plan.html --export out/",
    ),
    "compare": ("compare llama-3.1-8b-a100 llama-3.1-8b-h100-2048-256", "compare before.json after.json"),
    "serve": (
        "serve llama-3.1-8b-a100 --port 8000",
        "serve llama-3.1-8b-a100 --set cluster.replicas=2 --ports --speed 10",
    ),
    "web": ("web", "web --port 8080 --no-open"),
    "new": (
        "new 'vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4 --kv-cache-dtype fp8' --hardware h100 --rate 20",
        "new serve.sh --hardware h200 --strict",
    ),
    "schema": ("schema scenario",),
    "scenarios list": ("scenarios list --all",),
    "scenarios show": ("scenarios show llama-3.1-8b-a100",),
    "scenarios new": ("scenarios new --model llama-3.1-8b --hardware h100 --rate 20 --traffic code",),
    "hardware list": ("hardware list",),
    "hardware show": ("hardware show h100",),
    "hardware detect": ("hardware detect", "hardware detect --cpu --seconds 5"),
    "hardware new": ("hardware new my-npu --like a100-sxm-80gb",),
    "models list": ("models list",),
    "models show": ("models show llama-3.1-8b",),
}


def epilog_of(command: str) -> str | None:
    """The examples of a command as Markdown, a line each; None of a group of commands."""
    lines = [f"- `perfmodel {line}`" for line in EXAMPLES.get(command, ())]
    return "\n\n".join(["Examples:", *lines]) if lines else None
