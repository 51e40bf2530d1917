"""A conversation with the server over its ASGI interface, in virtual time."""

from asgi_client import Client
from virtual_time import run

from perfmodel.serve import Emulator
from perfmodel.serve.http import build_app
from perfmodel.serve.settings import ServerSettings
from perfmodel.specs import load_scenario

SCENARIO = load_scenario("llama-3.1-8b-a100")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def served(conversation, settings=None, changes=(), speed=1.0, **ways):
    """What `conversation`, called with a client and the emulator, returns; ways: further options of `build_app`."""

    async def whole():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100", changes) if changes else SCENARIO, speed=speed)
        app = build_app(emulator, settings or ServerSettings(), **ways)
        emulator.start()
        result = await conversation(Client(app), emulator)
        assert emulator.num_under_way == 0
        emulator.stop()
        return result

    return run(whole())
