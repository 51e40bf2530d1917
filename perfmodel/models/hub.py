"""Models by their name on the Hugging Face Hub: what the local cache of its client holds, else what the Hub answers.

Read are `config.json`, `hf_quant_config.json` where ModelOpt keeps formats in it, and `generation_config.json`, which
says how a server samples; of weights the header of one file, where the configuration leaves open what they are stored
as. What the Hub answers stays in the client's cache, a header's answer in our own, so it is asked once.
Environment variables are the client's own: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from perfmodel.errors import MissingExtraError, SpecError
from perfmodel.files.sandbox import allow_path, is_only_names, read_json
from perfmodel.models.hf.config import HF_QUANT_CONFIG, load_config
from perfmodel.models.spec import ModelSpec, SamplingMethod
from perfmodel.models.weights.headers import given_fields, states_format, stored_beside, stored_settings

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

    Raises SpecError for an unreadable repository, with the way out, MissingExtraError without the Hub's client."""
    with allow_path(_cache()):
        config, origin = _cached(name), "local cache of the Hub"
        if config is None:
            config, origin = _fetched(name), _host()
        try:
            model = load_config(config, name, stored=_stored(name, config))
        except SpecError as error:
            raise SpecError(
                f"{name} as the Hub has it: {error} Delete {config.parent} to have it asked again."
            ) from None
        sampling = _sampling(config.with_name(_BESIDE[1]))
        return replace(model, hf_id=name, source=f"config.json of {name} ({origin})", sampling=sampling)


def _stored(name: str, config: Path) -> dict[str, Any]:
    """What the weights are stored as, where the configuration leaves it open: by the header of a file in the cache, or
    of the Hub's first."""
    fields, stored = given_fields(config), stored_beside(config)
    if stored or not fields or states_format(config) or fields & {"dtype", "torch_dtype"}:
        return stored
    own_file = _folder(name) / "perfmodel-stored.json"  # beside the client's cache, which has no place for it
    try:
        answer = read_json(own_file)
    except (OSError, ValueError):
        answer = _stored_on_hub(name)
        if answer is not None:
            with suppress(OSError):
                own_file.parent.mkdir(parents=True, exist_ok=True)
                own_file.write_text(json.dumps(answer), encoding="utf-8", newline="\n")
    return answer if isinstance(answer, dict) else {}


def _stored_on_hub(name: str) -> dict[str, Any] | None:
    """By ranges of the only file, or of the first that the index names; {} where the repository has neither, None where
    nobody answers: then the configuration's defaults hold, until somebody does."""
    if _is_offline():
        return None
    from huggingface_hub import HfApi, errors, hf_hub_download

    def header(file: str) -> dict[str, Any]:
        tensors = HfApi(endpoint=_endpoint()).parse_safetensors_file_metadata(name, file, timeout=_CONNECT_S).tensors
        return {key: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for key, tensor in tensors.items()}

    def first_of_several() -> dict[str, Any]:
        index = read_json(Path(_download(hf_hub_download, name, _INDEX)))
        return header(str(min(index["weight_map"].values())))

    for read in (partial(header, "model.safetensors"), first_of_several):
        try:
            return stored_settings(_within(_ANSWER_S, read), name)
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


def _folder(name: str) -> Path:
    return _cache() / f"models--{name.replace('/', '--')}"


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _host() -> str:
    return (_endpoint() or _HUB).partition("://")[2].strip("/")


def _cached(name: str) -> Path | None:
    """`config.json` of the snapshot that `main` refers to, or of any; None where there is none."""
    ref = _folder(name) / "refs" / "main"
    try:
        main = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
        snapshots = sorted((_folder(name) / "snapshots").glob(f"*/{_CONFIG}"))
    except (OSError, UnicodeError):
        return None
    return next((file for file in snapshots if file.parent.name == main), snapshots[-1] if snapshots else None)


def _fetched(name: str) -> Path:
    """`config.json` in the cache, and beside it what else there is."""
    unknown = f"unknown model {name!r}: no card lists it"
    if is_only_names():
        raise SpecError(
            f"{unknown}, the local cache of the Hub does not have it, and nothing is fetched here: drop its "
            f"config.json on the page, or run `perfmodel models show {name}` once."
        )
    if _is_offline():
        raise SpecError(f"{unknown}, it is not in {_cache()}, and HF_HUB_OFFLINE is set.")
    # Else the client asks for more than the repository, and draws bars for files of a few kilobytes.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingExtraError(f"{unknown}; to ask the Hub, pip install '.[hub]' in the checkout.") from None
    _refuse_unreachable(unknown)
    print(f"asking {_host()} for {_CONFIG} of {name}", file=sys.stderr)
    try:
        config = _within(_ANSWER_S, partial(_download, hf_hub_download, name, _CONFIG))
    except Exception as error:
        raise SpecError(f"{unknown}, and of {_host()}: {_reason(error)}.") from None
    for other in _BESIDE:
        with suppress(Exception):  # most repositories have one of them, some none
            _within(_ANSWER_S, partial(_download, hf_hub_download, name, other))
    return Path(config)


def _download(download: Callable[..., Any], name: str, file: str) -> str:
    return str(download(name, file, cache_dir=_cache(), etag_timeout=_CONNECT_S, endpoint=_endpoint()))


def _reason(error: Exception) -> str:
    """Why the Hub did not give a configuration; the client's transport has a family of errors of its own."""
    from huggingface_hub import errors

    unreachable = f"it could not be reached, or did not answer within {_ANSWER_S:g} s"
    if isinstance(error, errors.GatedRepoError):
        return "it is gated; set HF_TOKEN to a token of an account that was given access"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or HF_TOKEN may not see it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return unreachable
    if isinstance(error, errors.EntryNotFoundError):
        return f"the repository has no {_CONFIG}; give a config.json or a .gguf file"
    if isinstance(error, errors.HfHubHTTPError):
        return unreachable if error.response is None else f"it answered {error.response.status_code}"
    return f"{unreachable} ({type(error).__name__})"


def _refuse_unreachable(unknown: str) -> None:
    """Raises SpecError where nobody listens: the client would try again for minutes. A proxy is left to the client."""
    if any(os.environ.get(variable) for variable in _PROXIES + tuple(map(str.lower, _PROXIES))):
        return
    address = urlsplit(_endpoint() or _HUB)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise SpecError(
            f"{unknown}, and {_host()} could not be reached within {_CONNECT_S:g} s "
            f"({error}); check HF_ENDPOINT and the network."
        ) from None


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """What `ask` returns or raises. Raises TimeoutError where that takes longer; it is then left behind."""
    from concurrent.futures import Future

    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    return answer.result(timeout=seconds)


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
    return "top_k" if isinstance(given.get("top_k"), int) and given["top_k"] > 0 else "random"
