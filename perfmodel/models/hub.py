"""Models by their name on the Hugging Face Hub: what the local cache of its client holds, else what the Hub answers.

Read are `config.json`, `hf_quant_config.json` where ModelOpt keeps formats in it, and `generation_config.json`, which
says how a server samples; of weights the header of one file, where the configuration leaves open what they are stored
as. What the Hub answers stays in the client's cache, a header's answer in our own, so it is asked once.
Environment variables are the client's own: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from perfmodel.errors import MissingExtraError, SpecError
from perfmodel.files.reach import is_only_names, read_json, touchable
from perfmodel.models.hf.config import load_config
from perfmodel.models.spec import ModelSpec, SamplingMethod
from perfmodel.models.weights.stored import HF_QUANT_CONFIG, is_format_said, said_fields

_CONNECT_S = 3.0
_ANSWER_S = 10.0  # for one small file, retries included: the client itself would try for minutes
_HUB = "https://huggingface.co"
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_BESIDE = (HF_QUANT_CONFIG, "generation_config.json")
# huggingface_hub.utils.validate_repo_id: letters, digits, "-", "_", ".", at most 96 of them, no ".." and no "--".
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_FILES = (".gguf", ".json", ".safetensors", ".yaml", ".yml")


def is_hub_name(text: str) -> bool:
    """Whether `text` can be the name of a repository, `org/name`, and no file's."""
    is_file = text.lower().endswith(_FILES)
    return _NAME.fullmatch(text) is not None and not is_file and "--" not in text and ".." not in text


def load_from_hub(name: str) -> ModelSpec:
    """The model of the repository `name`, from the cache without any traffic, else from the Hub.

    Raises SpecError for a repository that cannot be read, in one sentence with the way out, MissingExtraError where
    the Hub's client is not installed.
    """
    with touchable(_cache()):
        return _loaded(name)


def _loaded(name: str) -> ModelSpec:
    """See `load_from_hub`."""
    config = _cached(name)
    origin = f"config.json of {name} (local cache of the Hub)"
    if config is None:
        config = _fetched(name)
        origin = f"config.json of {name} ({_host()})"
    try:
        model = load_config(config, name, stored=_stored(name, config))
    except SpecError as error:
        raise SpecError(f"{name} as the Hub has it: {error} Delete {config.parent} to have it asked again.") from None
    return replace(model, hf_id=name, source=origin, sampling=_sampling(config.with_name(_BESIDE[1])))


def _stored(name: str, config: Path) -> dict[str, Any]:
    """What the weights are stored as, where the configuration leaves it open: by the header of a file in the cache, or
    of the Hub's first."""
    from perfmodel.models.weights.headers import stored_beside

    said, here = said_fields(config), stored_beside(config)
    if here or not said or is_format_said(config) or said & {"dtype", "torch_dtype"}:
        return here
    kept = _kept(name)
    try:
        answer = read_json(kept)
    except (OSError, ValueError):
        answer = _asked_for_header(name)
        if answer is not None:
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(answer), encoding="utf-8", newline="\n")
    return answer if isinstance(answer, dict) else {}


def _kept(name: str) -> Path:
    """Our own file beside the client's cache, for what it has no place for."""
    return _cache() / f"models--{name.replace('/', '--')}" / "perfmodel-stored.json"


def _asked_for_header(name: str) -> dict[str, Any] | None:
    """By ranges of the only file, or of the first that the index names; {} where the repository has neither, None where
    nobody answers: then the configuration's defaults hold, until somebody does."""
    if _is_offline():
        return None
    from huggingface_hub import HfApi, errors, hf_hub_download

    from perfmodel.models.weights.stored import stored_settings

    endpoint = os.environ.get("HF_ENDPOINT") or None
    api = HfApi(endpoint=endpoint)

    def header(file: str) -> str:
        tensors = api.parse_safetensors_file_metadata(name, file, timeout=_CONNECT_S).tensors
        return json.dumps({key: {"dtype": each.dtype, "shape": list(each.shape)} for key, each in tensors.items()})

    def first_of_several() -> str:
        found = hf_hub_download(name, _INDEX, cache_dir=_cache(), etag_timeout=_CONNECT_S, endpoint=endpoint)
        return header(str(min(read_json(Path(found))["weight_map"].values())))

    for read in (lambda: header("model.safetensors"), first_of_several):
        try:
            return stored_settings(json.loads(_within(_ANSWER_S, read)), name)
        except errors.LocalEntryNotFoundError:
            return None
        except errors.EntryNotFoundError:
            continue
        except SpecError:
            raise
        except Exception:  # the client's transport has a family of errors of its own
            return None
    return {}


def _is_offline() -> bool:
    return is_only_names() or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _cache() -> Path:
    """Where the Hub's client keeps what it fetched (huggingface_hub.constants)."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"))


def _host() -> str:
    return (os.environ.get("HF_ENDPOINT") or _HUB).partition("://")[2].strip("/")


def _cached(name: str) -> Path | None:
    """`config.json` of the snapshot that `main` refers to, or of any; None where there is none."""
    folder = _cache() / f"models--{name.replace('/', '--')}"
    named = folder / "refs" / "main"
    try:
        main = named.read_text(encoding="utf-8").strip() if named.is_file() else ""
        snapshots = sorted((folder / "snapshots").glob(f"*/{_CONFIG}"))
    except (OSError, UnicodeError):
        return None
    return next((each for each in snapshots if each.parent.name == main), snapshots[-1] if snapshots else None)


def _fetched(name: str) -> Path:
    """`config.json` in the cache, and beside it what else there is."""
    if is_only_names():
        raise SpecError(
            f"unknown model {name!r}: no card lists it, the local cache of the Hub does not have it, and nothing is "
            f"fetched here: drop its config.json on the page, or run `perfmodel models show {name}` once."
        )
    if _is_offline():
        raise SpecError(
            f"unknown model {name!r}: no card lists it, it is not in {_cache()}, and HF_HUB_OFFLINE is set."
        )
    # Else the client asks for more than the repository, and draws bars for files of a few kilobytes.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingExtraError(
            f"unknown model {name!r}: no card lists it; to ask the Hub, pip install '.[hub]' in the checkout."
        ) from None
    _refuse_unreachable(name)
    print(f"asking {_host()} for {_CONFIG} of {name}", file=sys.stderr)
    file = Path(_asked(hf_hub_download, name, _CONFIG))
    for other in _BESIDE:
        try:
            _asked(hf_hub_download, name, other)
        except SpecError:
            continue  # most repositories have one of them, some none
    return file


def _asked(download: Any, name: str, file: str) -> str:
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return _within(
            _ANSWER_S,
            lambda: str(download(name, file, cache_dir=_cache(), etag_timeout=_CONNECT_S, endpoint=endpoint)),
        )
    except errors.GatedRepoError:
        reason = "it is gated; set HF_TOKEN to a token of an account that was given access"
    except errors.RepositoryNotFoundError:
        reason = "there is no such repository, or HF_TOKEN may not see it"
    except errors.EntryNotFoundError as error:
        offline = isinstance(error, errors.LocalEntryNotFoundError)
        reason = _unreachable() if offline else f"the repository has no {file}; give a config.json or a .gguf file"
    except errors.HfHubHTTPError as error:
        reason = f"it answered {error.response.status_code}" if error.response is not None else _unreachable()
    except Exception as error:  # the client's transport has a family of errors of its own
        reason = f"{_unreachable()} ({type(error).__name__})"
    raise SpecError(f"unknown model {name!r}: no card lists it, and of {_host()}: {reason}.")


def _refuse_unreachable(name: str) -> None:
    """Raises SpecError where nobody listens: the client would try again for minutes. A proxy is left to the client."""
    if any(os.environ.get(variable) for variable in _PROXIES + tuple(map(str.lower, _PROXIES))):
        return
    address = urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise SpecError(
            f"unknown model {name!r}: no card lists it, and {_host()} could not be reached within {_CONNECT_S:g} s "
            f"({error}); check HF_ENDPOINT and the network."
        ) from None


def _within(seconds: float, ask: Callable[[], str]) -> str:
    """What `ask` returns or raises. Raises TimeoutError where that takes longer; it is then left behind."""
    answers: SimpleQueue[str | Exception] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _unreachable() -> str:
    return f"it could not be reached, or did not answer within {_ANSWER_S:g} s"


def _sampling(file: Path) -> SamplingMethod:
    """What a server does by default with a `generation_config.json`: vLLM takes its sampling from it."""
    try:
        given = read_json(file)
    except (OSError, ValueError):
        return "greedy"
    if not isinstance(given, Mapping) or not given.get("do_sample"):
        return "greedy"
    if isinstance(given.get("top_p"), int | float) and given["top_p"] < 1:
        return "top_p"
    if isinstance(given.get("top_k"), int) and given["top_k"] > 0:
        return "top_k"
    return "random"
