"""JSON over HTTP to a server that may be busy, loading or wrong: asked again where that can help, told plainly where it cannot.

The standard library alone: what transformers bring along for HTTP changed twice within the versions that we take.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

KEY = "DRAFTSMITH_API_KEY"  # a name of our own: a key for some other service never goes to a server by accident
LONGEST = 60.0  # seconds between two tries, unless the server asks for more
PATIENCE = 600.0  # seconds that a server may ask us to wait
ADVICE = {
    401: f"Put the key that the server was started with into the environment as {KEY}",
    403: f"Put a key that may use this model into the environment as {KEY}",
    404: "Is this the address of an OpenAI-compatible server, and does it have the model?",
}


class Fault(RuntimeError):
    """A request without a usable answer: the last HTTP `status` (None where none came), what the server `said`, and whether it is
    `hopeless`: any other request would meet the same."""

    def __init__(self, message: str, status: int | None = None, said: str = "", hopeless: bool = False) -> None:
        super().__init__(message)
        self.status, self.said, self.hopeless = status, said, hopeless


class _Again(Exception):
    def __init__(self, why: str, advice: str, status: int | None = None, after: float = 0.0, hopeless: bool = False) -> None:
        super().__init__(why)
        self.advice, self.status, self.after, self.hopeless = advice, status, after, hopeless


class Endpoint:
    """One server. Its key comes from the environment, travels in the Authorization header alone, and is in no error."""

    def __init__(self, url: str, timeout: float, retries: int, sleep: Callable[[float], None] = time.sleep) -> None:
        parts = urllib.parse.urlsplit(url)
        if "@" in url or parts.query or parts.fragment:  # not shown: it may be a secret
            raise ValueError(f"the url of a server holds a user, a password or a query; give it bare, and its key as {KEY}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the url of a server; one looks like http://localhost:8000/v1")
        path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"
        self._key = os.environ.get(KEY, "")
        if not (self._key.isascii() and self._key.isprintable()) or " " in self._key:
            raise ValueError(f"{KEY} holds what no header can carry: a space, or a line break at its end?")
        self._timeout, self._retries, self._sleep = timeout, retries, sleep
        direct = [urllib.request.ProxyHandler({})] if parts.hostname in ("localhost", "127.0.0.1", "::1") else []
        self._open = urllib.request.build_opener(_NoRedirect(), *direct).open

    def ask(self, path: str, body: dict[str, Any] | None = None, retries: int | None = None) -> Any:
        """POST `body` (GET without one) and return the JSON that comes back; Fault where there is none.

        No connection, a broken answer, 429 and 5xx are tried again, after 1, 2, 4 ... seconds less a random part, so that rows
        that failed together do not come back together, or later where Retry-After says so. Other statuses are final.
        """
        tries = 1 + (self._retries if retries is None else retries)
        where = f"{self.url}{path}"
        for attempt in range(tries):
            try:
                return self._once(where, body)
            except _Again as again:  # noqa: PERF203
                if again.after > PATIENCE:
                    message = f"{where}: {again}; it wants no request for {again.after:.0f} s. Repeat the command then"
                    raise Fault(message, again.status, hopeless=True) from None
                if attempt + 1 == tries:
                    message = f"{where}: {again}, tried {tries} times. {again.advice}"
                    raise Fault(message, again.status, hopeless=again.hopeless) from None
                self._sleep(max(again.after, min(LONGEST, 2.0**attempt) * random.uniform(0.5, 1.0)))
        raise ValueError(f"retries must be 0 or more, found {tries - 1}")

    def _once(self, where: str, body: dict[str, Any] | None) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._open(urllib.request.Request(where, data, headers), timeout=self._timeout) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            raise self._told(error, where) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error) from None
        try:
            return json.loads(raw)
        except ValueError:
            advice = "Does something between here and the server change its answers?"
            raise _Again(f"200, but no JSON: {self._shown(raw)}", advice, 200) from None

    def _told(self, error: urllib.error.HTTPError, where: str) -> Exception:
        status = error.code
        try:
            said = self._shown(error.read())
        except (OSError, http.client.HTTPException):
            said = "(its text broke off)"
        if status == 429:
            return _Again(f"{status}: {said}", "Lower the concurrency", status, _seconds(error.headers.get("Retry-After")))
        if status >= 500:
            return _Again(f"{status}: {said}", "The server's log says more", status, _seconds(error.headers.get("Retry-After")))
        if status < 400:
            to = str(error.headers.get("Location")).partition("?")[0]
            return Fault(f"{where}: {status}: it points to {to}. That is not followed, since the key would go along: give the right url",
                         status, said, hopeless=True)  # fmt: skip
        advice = ADVICE.get(status, "Asking again would not change that")
        return Fault(f"{where}: {status}: {said}. {advice}", status, said, hopeless=status in ADVICE)

    def _silence(self, error: Exception) -> _Again:
        reason = getattr(error, "reason", error)
        why = self._shown(f"no answer ({type(reason).__name__}: {reason})".encode())
        if isinstance(reason, TimeoutError):
            return _Again(
                why, f"Some answers take longer than the timeout, {self._timeout:g} s: raise it, or lower the concurrency"
            )
        return _Again(why, "Is the server up, and is this its address? Large weights take minutes to load", hopeless=True)

    def _shown(self, raw: bytes) -> str:
        """What the server said: short, on one line, and without the key, which some servers repeat."""
        text = raw.decode("utf-8", "replace")
        try:
            told = json.loads(text)
            told = told.get("error", told)  # {"error": {"message": ...}}, or {"message": ...} from a vLLM of before 0.10
            text = str(told["message"] if isinstance(told, dict) else told)
        except (ValueError, AttributeError, KeyError):
            pass
        for secret in {self._key, json.dumps(self._key)[1:-1]} - {""}:
            text = text.replace(secret, "***")
        text = " ".join(text.split())
        return text[:500] + (" ..." if len(text) > 500 else "") or "(no text)"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """The library's own would send the Authorization header on to whatever host is named."""
        return None


def _seconds(after: str | None) -> float:
    """A Retry-After header: a number of seconds, or a date."""
    try:
        return max(0.0, float(after or 0))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(str(after)).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
