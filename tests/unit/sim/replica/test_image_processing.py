"""Images on the host: what an API server's threads take for them, which wait, and what its cache saves."""

import pytest

from perfmodel.cost import ServerFit
from perfmodel.cost.calibrations.host_work import HostImages, ImageSeconds, host_images, load_image_work
from perfmodel.engine import EncoderInput, Request
from perfmodel.planning.encoders import processing_s
from perfmodel.sim import simulate
from perfmodel.sim.replica.host_cores import core_notes
from perfmodel.sim.replica.replica import FrontEnd, ImageThreads
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import Scenario, load_scenario

NAME = "qwen3-vl-4b-a100-encode-pool"
MS = 10**9
SERVER = ServerFit(in_serial_s=1e-3)


def load(*changes: str) -> Scenario:
    return load_scenario(NAME, ["cluster={replicas: 1}", "traffic.num_requests=20", *changes])


def work_of(*changes: str) -> HostImages:
    work = host_images(load(*changes))
    assert work is not None
    return work


def threads(num_processes: int = 1, num_decoding: int = 8, room: float = 1e9) -> ImageThreads:
    """10 ms to decode an image, 20 ms to process it, 2 ms for a request and 3 ms more for one with new images."""
    return ImageThreads(HostImages((ImageSeconds(0.01, 0.02, 100),), 2e-3, 3e-3), num_decoding, room, num_processes)


def delay_ms(front: FrontEnd, *contents: object, now: int = 0, session: object = None) -> float:
    request = Request(0, now, 10, 1)
    request.session = session  # type: ignore[assignment]
    request.encoder_inputs = tuple(EncoderInput(0, 1, content) for content in contents)
    return front.delay(request, now) / MS


def test_twice_the_pixels_take_twice_as_long_to_decode() -> None:
    """The file and its colors double. The processor has 0.9 ms of the server's work, which do not."""
    one, two = (work_of(f"traffic.images.sizes={size}").sizes[0] for size in ("640x640", "640x1280"))
    assert two.decode_s == pytest.approx(2 * one.decode_s)
    fixed_s = (
        load().engine.described.facts.api_server_images.new_image_s + load_image_work().processors["qwen_vl"].image_s
    )
    assert two.process_s - fixed_s == pytest.approx(2 * (one.process_s - fixed_s))
    assert two.num_bytes == 2 * one.num_bytes == 2 * 1600 * (3 * 2 * 16 * 16) * 2  # patches of two equal frames


def test_only_what_the_encoder_gets_grows_with_the_rule_of_resizing() -> None:
    """Gemma 3 shrinks any image to 896 x 896: four times the pixels add what reading them takes."""
    small, large = (
        work_of("model=gemma-3-27b", f"traffic.images.sizes={size}").sizes[0] for size in ("1000x1000", "2000x2000")
    )
    fit = load_image_work().processors["gemma3"]
    assert large.process_s - small.process_s == pytest.approx(3e6 * fit.pixel_s)
    assert large.num_bytes == small.num_bytes


def test_noise_has_more_bytes_of_jpeg_and_png_is_not_asked() -> None:
    sizes = [f"traffic.images.bytes_per_pixel={count}" for count in (0.2, 0.6)]
    smooth, noise = (work_of(size).sizes[0].decode_s for size in sizes)
    assert noise - smooth == pytest.approx(640 * 640 * 0.4 * load_image_work().decoders["jpeg"].byte_s)
    png = [work_of("traffic.images.encoding=png", size).sizes[0].decode_s for size in sizes]
    assert png[0] == png[1] > noise


def test_a_host_that_is_half_as_fast_takes_twice_as_long() -> None:
    plain, slow = work_of(), work_of("overheads.host=2")
    assert slow == plain.times(2.0)
    assert slow.request_s == 2 * plain.request_s > 0


def test_text_costs_what_it_did_and_knows_no_images() -> None:
    assert host_images(load("traffic.images=null")) is None
    fronts = FrontEnd(SERVER), FrontEnd(SERVER, 1, threads())
    assert [[front.delay(Request(0, 0, 10, 1), 0) for _ in range(3)] for front in fronts] == [[MS, 2 * MS, 3 * MS]] * 2
    assert "image_processing" not in simulate(load("traffic.images=null"), intervals=False).summary


def test_an_image_is_decoded_and_then_processed() -> None:
    """1 ms of tokens, 10 to decode, 2 + 3 for the request, 20 to process. The next is decoded beside that: 25 later."""
    front = FrontEnd(SERVER, 1, threads())
    assert delay_ms(front, "a") == 1 + 10 + 5 + 20
    assert delay_ms(front, "b") == 36 + 25


def test_so_many_threads_decode_at_once() -> None:
    """Nine images of a request on eight threads take two rounds, on nine one."""
    taken = [
        delay_ms(FrontEnd(SERVER, 1, threads(num_decoding=count)), *range(9)) - (1 + 5 + 9 * 20) for count in (8, 9)
    ]
    assert taken == [20, 10]


def test_more_api_servers_share_the_work() -> None:
    """Two requests at once: one after another on one server, side by side on two, behind 1 ms of tokens each."""
    one, two = (FrontEnd(SERVER, count, threads(count)) for count in (1, 2))
    assert [delay_ms(one, "a"), delay_ms(one, "b")] == [36, 61]
    assert [delay_ms(two, "a"), delay_ms(two, "b")] == [36, 36]


def test_a_cached_image_is_decoded_and_not_processed_again() -> None:
    """As in vLLM, which decodes an image before it looks for it."""
    front = FrontEnd(SERVER, 1, threads())
    delay_ms(front, "a")
    assert delay_ms(front, "a", now=1000 * MS) == 1 + 10 + 2
    assert delay_ms(front, "a", "b", now=2000 * MS) == 1 + 10 + 5 + 20
    assert front.images is not None
    assert (front.images.num_images, front.images.num_cached) == (4, 2)


@pytest.mark.parametrize(("room", "num_cached"), [(0, 0), (99, 0), (200, 2), (300, 4)])
def test_the_cache_drops_what_was_not_asked_for_longest(room: int, num_cached: int) -> None:
    """Of 100 bytes each. With room for two, c takes the place of b, and b that of c."""
    front = FrontEnd(SERVER, 1, threads(room=room))
    for number, content in enumerate("abacab"):
        delay_ms(front, content, now=number * 1000 * MS)
    assert front.images is not None
    assert front.images.num_cached == {0: 0, 99: 0, 200: 2, 300: 3}[room]


def test_answers_of_a_prompt_share_its_images() -> None:
    """They are one request to the server, whose images are worked on once."""
    front = FrontEnd(SERVER, 1, threads(room=0))
    assert [delay_ms(front, "a", session=7), delay_ms(front, "a", session=7)] == [36, 36]
    assert delay_ms(front, "a", session=8) == 61


def test_beams_are_of_one_request() -> None:
    """A later token of a beam is asked for with what the first had processed."""
    front, request = FrontEnd(ServerFit(beam_s=4e-4), 1, threads(room=0)), Request(0, 0, 10, 1)
    request.encoder_inputs = (EncoderInput(0, 1, "a"),)
    delays = []
    for request.beam_step in (0, 1):
        delays.append(front.delay(request, 1000 * MS * request.beam_step))
    assert delays == [35 * MS, 0.4 * MS]


def test_few_cores_make_threads_wait_for_each_other() -> None:
    """Eleven threads that may have work on two cores: four images at once take longer."""
    one = "traffic.arrivals={process: closed_loop, concurrency: 1}"
    alone, shared = (
        simulate(load(one, *more), intervals=False).summary["image_processing"]["mean_ms"]
        for more in ([], ["cluster.host={cores: 2}"])
    )
    assert shared > 1.05 * alone
    assert "with their threads for images on host.cores=2" in core_notes(load("cluster.host={cores: 2}"))[0]
    assert core_notes(load("cluster.host={cores: 12}")) == []


def test_images_that_repeat_share_blocks_and_sizes() -> None:
    """Prompts that begin with the same image share the blocks of it alone, of 16 tokens."""
    changes = ("traffic.images.num_distinct=3", "traffic.images.sizes=[640x640, 320x320]", "traffic.num_requests=200")
    requests = list(Workload(load(*changes)).requests())
    by_content = {item.content: item.size for request in requests for item in request.encoder_inputs}
    assert len(by_content) == 3
    assert all(by_content[item.content] == item.size for request in requests for item in request.encoder_inputs)
    first, *others = requests
    image = first.encoder_inputs[0]
    for other in others:
        same = [a == b for a, b in zip(first.block_hashes, other.block_hashes, strict=False)]
        if other.encoder_inputs[0].content != image.content:
            assert not any(same)
        elif other.encoder_inputs[1].content != first.encoder_inputs[1].content:
            assert sum(same) == first.encoder_inputs[1].offset // 16
    never = [request.block_hashes for request in Workload(load()).requests()]
    assert never == [()] * 20


def test_repeated_images_are_found_by_the_server_and_the_prefix_cache() -> None:
    summary = simulate(
        load("traffic.images={num_distinct: 2, sizes: 640x640}", "engine.enable_prefix_caching=true"), intervals=False
    ).summary
    assert summary["image_processing"]["images"] == 20
    assert summary["image_processing"]["cached"] == 18
    assert summary["prefix_cache_hit_rate"] > 0.4


def test_a_run_says_that_its_api_servers_limit_it() -> None:
    """With a host twenty times as slow images take longer than all else; four API servers share them, and no servers
    share the first decoding and the last step."""
    changes = (
        "overheads.host=20",
        "traffic.num_requests=40",
        "traffic.arrivals={process: burst}",
        "traffic.output_tokens.value=1",
    )
    one, four = (simulate(load(*changes, f"engine.api_server_count={count}"), intervals=False) for count in (1, 4))
    assert any(note.startswith("API servers limit this run") for note in one.notes)
    assert 2.5 < one.summary["duration"] / four.summary["duration"] < 4
    rate = one.summary["request_throughput"]
    assert rate == pytest.approx(1 / processing_s(load(*changes), 1)[0], rel=0.1)


def test_encode_replicas_and_readers_both_process_images() -> None:
    """The proxy sends each image to an encode replica, and the whole request to the one that reads it."""
    pools = "cluster.pools=[{role: encode}, {replicas: 12}]"
    burst = ("traffic.arrivals={process: burst}", "traffic.output_tokens.value=1")
    run = simulate(load_scenario(NAME, ["traffic.num_requests=60", pools, *burst]), intervals=False)
    assert run.summary["image_processing"]["images"] == 2 * 60 * 4
    assert any(note.startswith("Encode replicas limit this run") for note in run.notes)
