"""Decoding of text whose charset is declared, wrongly declared, or unknown.

The order of the choice:

1. A byte order mark.
2. Bytes with zeros: UTF-32 or UTF-16 without a mark, if that gives characters of text.
3. UTF-8. Other text is hardly ever valid UTF-8 by chance, so this comes before a declaration. A few wrong
   bytes are replaced: a program has cut a character, or appended a line in another charset.
4. The declared charset, by the names and aliases of the WHATWG (`webencodings`), else of Python.
5. The charset of Japanese, Korean or Chinese in which nearly all characters are common ones.
6. charset-normalizer. It cannot tell some charsets of Latin letters apart, because each byte is a letter in
   all of them. Of these, take the one whose letters belong to a single alphabet and stand in their places.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterator
from typing import Final

from permille.errors import PermilleError

_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
MARKS: Final = tuple(mark for mark, _ in _MARKS)
"""Byte order marks, with which a text may begin."""
_DETECTED: Final = (
    *("cp1252", "cp1250", "iso8859_2", "cp1254", "cp1257", "mac_roman", "cp1251", "koi8_r", "cp866"),
    *("cp850", "cp437", "cp852"),  # text of DOS, and of its programs that still run
    *("cp1253", "cp1255", "cp1256", "cp932", "euc_jp", "iso2022_jp", "gb18030", "big5", "cp949"),
)
_WESTERN: Final = (
    *("äöüß", "àâæçéèêëîïôùûüœÿ", "áéíñóúüªº", "ãáàâçéêíóôõúü", "àèéìîòóù", "åäöæøé", "ëïéèöüáóíà"),
    *("áðéíóúýþæö", "àçèéíïòóúü", "õäöüšž"),
)
_CENTRAL: Final = (
    *("áčďéěíňóřšťúůýž", "ąćęłńóśźż", "áéíóöőúüű", "áäčďéíĺľňóôŕšťúýž", "ăâîşţ", "čćđšž", "äöüß"),
)
# Letters beyond a to z of the languages that write in each charset. The first charset wins a tie.
_ALPHABETS: Final = {
    "cp1252": _WESTERN,
    "cp1250": _CENTRAL,
    "iso8859_2": _CENTRAL,
    "cp1254": ("çğıöşüâî\u0307",),
    "cp1257": ("āčēģīķļņšūž", "ąčęėįšųūž"),
    "mac_roman": _WESTERN,
    "cp850": _WESTERN,
    "cp437": _WESTERN,
    "cp852": _CENTRAL,
}
_WITHIN_WORDS: Final = "’·\u00ad"
_BOXES: Final = "─│┌┐└┘├┤┬┴┼═║╔╗╚╝"
_PUNCTUATION: Final = frozenset(f"–—‘‚“”„…«»‹›¿¡•°§€£©®™ ½¼²³×{_WITHIN_WORDS}{_BOXES}")
_HEAD_BYTES: Final = 1 << 16  # part of the bytes from which a charset of Latin letters is chosen
_MOST_DAMAGED: Final = 0.2  # share of wrong bytes to characters beyond ASCII in UTF-8
# An older standard of each charset, and the bytes of common characters there. Only Japanese has kana. The
# first charset wins a tie: each Korean letter is also a common character of Chinese.
_EAST_ASIAN: Final = {
    "cp949": ("euc_kr", rb"[\xa1\xa3\xb0-\xc8].|\xa4[\xa1-\xd3]"),
    "euc_jp": ("euc_jp", rb"[\xa1\xa4\xa5\xb0-\xcf]."),
    "cp932": ("shift_jis", rb"[\x81-\x83\x88-\x97].|[\xa1-\xdf]"),
    "gb18030": ("gb2312", rb"[\xa1\xa3\xb0-\xd7]."),
    "big5": ("big5", rb"[\xa1-\xc6]."),
}
_LOST: Final = re.compile(rb"\0{8,}")  # blocks of a file that were not written before the power failed
_CODES: Final = bytes({*range(32)} - {*b"\t\n\f\r\x1b"})
_WRONG: Final = re.compile("[\udc80-\udcff]+")  # bytes that are no UTF-8, as `surrogateescape` keeps them
_KANA: Final = re.compile("[\u3041-\u30fe]")
_LEAST_COMMON: Final = 0.85  # share of the characters beyond ASCII
_LEAST_KANA: Final = 0.2
_JAPANESE: Final = ("euc_jp", "shift_jis")
_LEAST_LETTERS: Final = 4


class UnreadableError(PermilleError):
    """Bytes that hold no text. The message is a reason for a report."""


def decode(data: bytes, declared: str | None = None) -> tuple[str, str]:
    r"""Return the text of `data`, and the charset that was used.

    Example:
        >>> decode("Grüße".encode("cp1252"), "iso-8859-1")
        ('Grüße', 'cp1252')

    Args:
        data: the bytes.
        declared: the charset that a header or a page names, which may be wrong or unknown.

    Raises:
        UnreadableError: the bytes are text in no charset that is known.
    """
    for mark, charset in _MARKS:
        if data.startswith(mark):
            # The end of a file that was cut off is no reason to lose the rest.
            return data.decode(charset, "replace").lstrip("\ufeff"), charset
    if b"\0" in data:
        # The upper byte of a space is zero in all languages. It comes first in big-endian order.
        order = "be" if data[::2].count(0) > data[1::2].count(0) else "le"
        for charset in (f"utf-32-{order}", f"utf-16-{order}"):
            if (text := _strict(data, charset)) is not None and _is_text(text):
                return text, charset
        data = _LOST.sub(b"", data)
        # A few zeros may stand in any text. A file with many zeros or control codes outside of such blocks is
        # a program or a picture.
        if not data or (len(data) - len(data.translate(None, _CODES))) * 100 > len(data):
            raise UnreadableError("holds bytes that are no text")
    # Charsets such as ISO-2022-JP write all characters as ASCII, so there the declaration comes first.
    charsets = [*_charsets(declared), *(["iso2022_jp"] if b"\x1b$" in data else [])]
    for charset in (*charsets, "utf-8") if data.isascii() else ("utf-8", *charsets):
        if (text := _strict(data, charset)) is not None:
            return text, "utf-8" if data.isascii() and text == data.decode("ascii") else charset
        if charset == "utf-8" and (text := _damaged_utf_8(data)) is not None:
            return text, "damaged utf-8"
    return _detected(data)


def _damaged_utf_8(data: bytes) -> str | None:
    """Return a text in UTF-8 with a few wrong bytes, or None if it is in another charset."""
    text = data.decode("utf-8", "surrogateescape")
    wrong = len(_WRONG.findall(text))
    if wrong > _MOST_DAMAGED * sum(not letter.isascii() for letter in _WRONG.sub("", text)):
        return None

    def replaced(found: re.Match[str]) -> str:
        letters = found[0].encode("utf-8", "surrogateescape").decode("cp1252", "replace")
        # A line in another charset has letters of cp1252. Other bytes are a part of a character.
        return letters if letters.isalpha() and found.end() < len(text) else "\ufffd"

    return _WRONG.sub(replaced, text)


def _charsets(declared: str | None) -> Iterator[str]:
    """Yield the codecs that a declaration may mean."""
    import webencodings

    label = (declared or "").strip("\"' \t\r\n")
    # A byte order mark or a zero would have shown UTF-16, so a declaration of it is wrong here.
    if not label or re.match("(?i)utf-?(16|32)|ucs|unicode$", label):
        return
    if (known := webencodings.lookup(label)) is not None:
        yield {"gbk": "gb18030"}.get(known.codec_info.name, known.codec_info.name)
    yield label


def _strict(data: bytes, charset: str) -> str | None:
    try:
        return data.decode(charset)
    except (LookupError, ValueError):  # such as an unknown name, or a codec of something else than text
        return None


def _is_text(text: str) -> bool:
    """Return whether at most one character in 50 is a control, private or unassigned character."""
    odd = sum(unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") for character in text)
    odd -= sum(map(text.count, "\t\n\r\f"))
    return odd * 50 <= len(text)


def _detected(data: bytes) -> tuple[str, str]:
    import charset_normalizer

    common = {one: _common(data, one) for one in _EAST_ASIAN}
    if common[best := max(common, key=lambda one: common[one])] >= _LEAST_COMMON:
        return data.decode(best), best
    found = charset_normalizer.from_bytes(data, cp_isolation=list(_DETECTED)).best()
    if found is None and (text := _strict(data, "cp1252")) is not None and _is_text(text):
        return text, "cp1252"  # too short for the detector
    if found is None:
        raise UnreadableError("not in a charset that is known")
    charset = found.encoding
    fits = {one: _fit(data[:_HEAD_BYTES], one) for one in _ALPHABETS}
    best = max(fits, key=lambda one: fits[one])
    if charset in _ALPHABETS or fits[best] == 1:
        charset = best
    if (text := _strict(data, charset)) is None:
        return str(found), found.encoding
    return text, charset


def _common(data: bytes, charset: str) -> float:
    """Return the share of a text's characters beyond ASCII that are common in a charset of East Asia."""
    text = _strict(data, charset) or ""
    letters = [one for one in text[:_HEAD_BYTES] if not one.isascii()]
    base, common = _EAST_ASIAN[charset]
    kana = sum(_KANA.match(one) is not None for one in letters)
    if len(letters) < _LEAST_LETTERS or (base in _JAPANESE and kana < _LEAST_KANA * len(letters)):
        return 0.0
    coded = (one.encode(base, "replace") for one in letters)
    return sum(re.fullmatch(common, one, re.DOTALL) is not None for one in coded) / len(letters)


def _fit(data: bytes, charset: str) -> float:
    """Return the share of a text's letters beyond ASCII that one alphabet of this charset has.

    A capital after a small letter, and a sign between letters, show that the charset is wrong.
    """
    if (text := _strict(data, charset)) is None:
        return -1.0
    letters = []
    for before, one, after in zip(f" {text}", text, f"{text[1:]} ", strict=False):
        is_within = before.isalpha() and after.isalpha() and one not in _WITHIN_WORDS
        if not one.isascii() and (is_within or one not in _PUNCTUATION):
            letters.append("\0" if one.isupper() and before.islower() else one.lower()[-1])
    if not letters:
        return 1.0
    return max(sum(one in alphabet for one in letters) for alphabet in _ALPHABETS[charset]) / len(letters)
