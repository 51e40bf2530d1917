"""`is_cross_site`: whether a page of another site, in somebody's browser, has sent a request.

Such a page can post a form, or what a form could have sent, to any server that the browser reaches, a local one too,
without being asked whether it may. It cannot read the answer, so only what a request changes has to be guarded.
"""

__all__ = ["is_cross_site"]

from collections.abc import Mapping

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether these headers, by their names in small letters, are those of a page from elsewhere, or of a form.

    Browsers say where a page is from (`Sec-Fetch-Site`, and before it `Origin`), and a page cannot make them say
    something else; a form has one of three content types, and is refused by them where an old browser says nothing.
    Programs that are no browsers say nothing of the kind.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    return headers.get("content-type", "").partition(";")[0].strip().lower() in _FORMS
