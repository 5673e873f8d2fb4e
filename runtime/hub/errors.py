"""The errors of the hub's client as errors of Quire: one line that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..common.errors import ConfigError, ModelNotFound, QuireError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

MAX_WAIT_DIGITS = 5  # digits of a time to wait that are shown
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raise a QuireError for each error of the hub's client, and of the disk with its cache."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ModelNotFound(
            f"{repo} is not completely in the cache, and HF_HUB_OFFLINE is set; unset it, or pull the model online"
        ) from error
    except HfHubHTTPError as error:
        raise status_error(repo, error) from error
    except httpx2.HTTPError as error:
        raise Unavailable(
            f"{_endpoint()} cannot be reached for {repo}: {_reason(error)}; check the network and HF_ENDPOINT, then "
            "repeat the command: a download continues where it stopped"
        ) from error
    except (HFValidationError, httpx2.InvalidURL) as error:
        raise ModelNotFound(f"{repo} is not a name of a model at {_endpoint()}: {error}") from error
    except OSError as error:
        raise disk_error(error) from error


def status_error(repo: str, error: HfHubHTTPError) -> QuireError:
    """Return the error for an answer of the hub that is not a success."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    response = error.response
    status = response.status_code
    page = f"{_endpoint()}/{repo}"
    match error:
        case GatedRepoError():
            return Unauthenticated(
                f"{repo} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account"
            )
        case EntryNotFoundError():
            return ModelNotFound(f"a file of {repo} has vanished from the hub; repeat the command")
    if isinstance(error, RepositoryNotFoundError) or (
        status == 401 and "Authorization" not in response.request.headers
    ):
        return ModelNotFound(
            f"there is no public model {repo} at {_endpoint()}, and no such file or folder here; check the spelling, "
            "or set HF_TOKEN if the model is private"
        )
    if status == 401:
        return Unauthenticated(f"{_endpoint()} refuses the token for {repo}; set HF_TOKEN to a valid one, or unset it")
    if status == 403:
        return Unauthenticated(f"the token has no access to {repo}; see {page}, or set HF_TOKEN to another one")
    if status == 404:
        return ModelNotFound(f"there is no {repo} at {_endpoint()}; check the spelling and HF_ENDPOINT")
    if status == 429:
        wait = response.headers.get("Retry-After", "")
        when = f"in {wait} s" if wait.isdecimal() and len(wait) <= MAX_WAIT_DIGITS else "later"
        return Unavailable(
            f"{_endpoint()} has had too many requests (429); repeat the command {when}, or set HF_TOKEN for more"
        )
    if status < 500:
        return ModelNotFound(f"{_endpoint()} refuses the request for {repo} with status {status}; check HF_ENDPOINT")
    return Unavailable(f"{_endpoint()} answers with status {status} for {repo}; repeat the command later")


def disk_error(error: OSError) -> ConfigError:
    """Return the error for a cache that cannot be written."""
    if error.errno in FULL:
        return ConfigError(
            f"the disk of {_cache()} is full; free space (`quire list`, `quire rm`), or set HF_HOME to a folder on "
            "another disk, then repeat the command: the download continues"
        )
    return ConfigError(
        f"the cache {_cache()} cannot be used: {error.strerror or error}; set HF_HOME to a folder that can be written"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
