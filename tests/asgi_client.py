"""A client of an ASGI application within the same event loop: no sockets, so it works in virtual time, too."""

import asyncio
import json


class Response:
    """What came back. `chunks`: (seconds of the event loop, bytes), as they came."""

    def __init__(self):
        self.status, self.headers, self.chunks, self.is_complete = None, {}, [], False

    @property
    def body(self):
        return b"".join(data for _, data in self.chunks)

    def json(self):
        return json.loads(self.body)

    @property
    def events(self):
        """(seconds, what an event says) of a stream of events, but for the last, [DONE]; names of events left out."""
        found = []
        for at, data in self.chunks:
            for part in filter(None, data.split(b"\n\n")):
                *names, line = part.split(b"\n")
                assert line.startswith(b"data: "), part
                assert all(name.startswith(b"event: ") for name in names), part
                found.append((at, line[6:]))
        return [(at, json.loads(line)) for at, line in found if line != b"[DONE]"]


class Client:
    """Sends requests to `app`."""

    def __init__(self, app):
        self.app = app

    async def call(self, method, path, body=b"", headers=(), leaves_at=None):
        """The answer; leaves_at: seconds of the event loop when the client goes away."""
        sent, response, gone = [], Response(), asyncio.Event()
        path, _, query = path.partition("?")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = [("content-type", "application/json"), *headers]
        loop = asyncio.get_running_loop()

        async def receive():
            if not sent:
                sent.append(True)
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if gone.is_set():
                return
            if message["type"] == "http.response.start":
                assert response.status is None
                response.status = message["status"]
                response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            assert response.status is not None
            if message.get("body"):
                response.chunks.append((loop.time(), message["body"]))
            if not message.get("more_body"):
                response.is_complete = True
                gone.set()

        if leaves_at is not None:
            loop.call_at(leaves_at, gone.set)
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode()}
        scope["query_string"] = query.encode()
        await self.app({**scope, "root_path": "", "headers": raw, "http_version": "1.1"}, receive, send)
        return response

    def get(self, path, **options):
        return self.call("GET", path, **options)

    def post(self, path, body, **options):
        return self.call("POST", path, body, **options)
