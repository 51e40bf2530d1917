"""`--vary hardware=a,b` asks which device, and answers so."""

from perfmodel.planning.points import Point, evaluate
from perfmodel.planning.whatif import ask_whatif
from perfmodel.report.views.whatif import whatif_sentences

NAME = "llama-3.1-8b-a100"
FEW = ("traffic.num_requests=40",)


def test_devices_are_ranked_by_each_metric_and_by_what_they_cost():
    found = ask_whatif(NAME, ["hardware=a100,h100,t4"], FEW, workers=1)
    lines = whatif_sentences(found)
    asked = found.answers.question.base.metrics
    assert "usd_per_million_output_tokens" in asked
    for metric, line in zip(asked, lines, strict=False):
        assert line.startswith("Which device? By ")
        points = {name: Point(NAME, (metric,), (*FEW, f"hardware={name}")) for name in ("a100", "h100")}
        by_hand = {name: evaluate(point).values[metric] for name, point in points.items()}
        is_rate = metric in ("output_throughput", "request_goodput")
        first, second = sorted(by_hand, key=lambda name: by_hand[name], reverse=is_rate)
        assert line.index(first) < line.index(second)
    assert any(line.startswith("No answer for t4: engine.dtype: got bfloat16") for line in lines)


def test_devices_of_pools_are_varied_too():
    path, asked = "cluster.pools.decode.hardware", ("mean_tpot_ms",)
    found = ask_whatif("llama-3.1-70b-h100-disaggregated", [f"{path}=h100,h200"], FEW, asked, workers=1)
    h100, h200 = (record.values["mean_tpot_ms"] for record in found.answers.by_axis[path])
    assert h200 < h100  # 4.8 of 3.35 TB/s
