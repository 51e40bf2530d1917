"""`perfmodel serve`, as a person starts it: a process that listens, answers a client, and ends when it is told to."""

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app


@contextmanager
def served(*arguments):
    """The addresses of a server in a process of its own, and the process; it must have been told to end."""
    command = [sys.executable, "-m", "perfmodel", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process, lambda: process.stderr.readline().split()[2]
    finally:
        process.kill()
        process.communicate()


def status_of(url):
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def test_it_answers_the_openai_client_and_ends_when_told_to():
    changes = ("--set", "cluster.replicas=2", "--set", "cluster.router=least_outstanding", "--api-key", "of-this-test")
    with served("llama-3.1-8b-a100", "--speed", "5", *changes) as (process, next_address):
        address = next_address()
        assert "perfmodel validate bench FILE --speed 5" in process.stderr.readline()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="of-this-test", max_retries=0)
        name = client.models.list().data[0].id
        whole = client.completions.create(model=name, prompt="One, two, three", max_tokens=12)
        assert whole.usage.completion_tokens == 12
        messages = [{"role": "user", "content": "Count on."}]
        chunks = list(
            client.chat.completions.create(
                model=name, messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True}
            )
        )
        texts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
        assert len(texts) == chunks[-1].usage.completion_tokens == 9
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="another", max_retries=0).models.list()
        page = urllib.request.urlopen(f"{address}/metrics", timeout=10).read().decode()
        assert 'vllm:generation_tokens_total{engine="0"' in page
        assert 'vllm:generation_tokens_total{engine="1"' in page
        process.send_signal(signal.SIGTERM)
        stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "Requests: 2 sent, 2 finished, 0 failed, 0 timed out, 0 aborted; 5 simulated seconds per second" in stderr


def test_replicas_have_ports_of_their_own_and_are_down_when_they_failed():
    failing = "cluster.failures={events: [{at_s: 0, pool: 0, replica: 1, down_s: 1000}]}"
    with served("llama-3.1-8b-a100", "--ports", "--set", "cluster.replicas=2", "--set", failing) as (_, next_address):
        first, second = next_address(), next_address()
        assert first != second
        assert [status_of(f"{each}/health") for each in (first, second)] == [200, 503]
        client = openai.OpenAI(base_url=f"{second}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="replica 1 is not up"):
            client.completions.create(model="llama-3.1-8b", prompt="Hello", max_tokens=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--speed", "0"), "--speed 0"),
        (("--metrics-names", "tgi"), "--metrics-names tgi"),
        (("--fail", "rate=2"), "rate 2"),
        (("--kv-arrays",), "kv_arrays"),
        (("--port", "65535", "--ports", "--set", "cluster.replicas=2"), "65535"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--set", "prompt_compression={ratio: 0.5}"), "prompt_compression"),
    ],
)
def test_what_cannot_be_served_is_a_sentence_and_status_2(arguments, said):
    found = CliRunner().invoke(app, ["serve", "llama-3.1-8b-a100", *arguments])
    assert found.exit_code == 2
    assert said in found.output
    assert "Traceback" not in found.output
