"""What passes as a conversation's id: a bearer secret of 128 random bits or more.

A guard against mistakes (a thread's name, a counter, a UUID), no proof of entropy: it cannot tell a random id from one
that stands in a manual, and some of what a person could guess passes.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import comb, log2
from string import ascii_lowercase, ascii_uppercase, digits, punctuation

_MIN_BITS = 128
_MAX_CHARS = 256
# Printable ASCII without the space, since the id travels in an HTTP header too. Each size is an alphabet in use:
# digits, hex, base36 (base32 is in it), base64url, all of it.
_ALPHABET = digits + ascii_lowercase + ascii_uppercase + "-_" + re.sub("[-_]", "", punctuation)
_SIZES = (10, 16, 36, 64, 94)
_CHARS = frozenset(_ALPHABET)
_HEX = frozenset("0123456789abcdef")
_SYMBOLS = bytes.maketrans(_ALPHABET.encode(), bytes(range(len(_ALPHABET))))
# In a given code at most 2^96 strings have a description of 96 bits. So of random ids, of which there are 2^128 or
# more, each of the two codes below refuses one in 2^32 at most: 5e-10 together.
_GUESSABLE_BITS = 96
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_T_OF_A_TIME = re.compile(r"(?<=\d\d)[Tt](?=\d\d[-:])")
# Words and numbers with separators, or fewer letters than 128 bits of base32, which may be letters alone, have.
_WORDS = re.compile(r"([a-z]{2,}\d*|\d+)([\W_]([a-z]{2,}\d*|\d+))+|[a-z]{2,25}")
_FIVE_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxz]{5}")
_COMMON_LETTERS = frozenset("etaoinshrdlu")


def check_conversation_id(conversation_id: str) -> str:
    """Return the id if 128 random bits could be in it and it does not look guessable.

    Raises:
        ValueError: it is too short, guessable, or cannot stand in a header. The message does not quote it.
    """
    if problem := _problem(conversation_id):
        raise ValueError(f"the conversation id {problem}. It is a bearer secret: use secrets.token_urlsafe(24)")
    return conversation_id


def _problem(text: str) -> str | None:
    if len(text) > _MAX_CHARS or not _CHARS.issuperset(text):
        return f"must fit an HTTP header: at most {_MAX_CHARS} characters, printable ASCII without spaces"
    # What stands beside a UUID may be the secret.
    if _UUID.search(text.lower()) and len(text) - 36 < _MIN_BITS / 6:
        return f"is a UUID, of whose bits 122 at most are random, expected {_MIN_BITS}"
    text = _T_OF_A_TIME.sub("-", text)
    # Smaller alphabets than these two are not told apart: of random ids of 32 hex characters one in 3,000,000 has only
    # digits, of those of 22 base64url characters one in 160,000 has letters of one case and digits.
    bare = re.sub(r"[-_.:+]", "", text.lower())
    bits = 4 * len(bare) if _HEX.issuperset(bare) else 6 * len(text)
    if bits < _MIN_BITS:
        return f"is too short: {len(text)} characters of its kind hold {bits} bits at most, expected {_MIN_BITS}"
    one_case = text.lower() if text.isupper() else text
    if _is_words(one_case):
        return "is made of words and numbers, which can be guessed"
    if _description_bits(one_case.encode().translate(_SYMBOLS)) <= _GUESSABLE_BITS:
        return "repeats itself, counts, or has few distinct characters, so it can be guessed"
    return None


def _is_words(text: str) -> bool:
    """Tell whether it is words and numbers that one could pronounce, with mostly common letters.

    Of random ids of 22 base64url characters 3e-8 have the form, one in 20 of them the letters too; of longer ids fewer.
    """
    if not _WORDS.fullmatch(text):
        return False
    letters = re.sub("[^a-z]", "", text)
    num_common = sum(letter in _COMMON_LETTERS for letter in letters)
    return num_common >= 0.6 * len(letters) and not _FIVE_CONSONANTS.search(text)


def _description_bits(symbols: bytes) -> float:
    """Return the length of the shorter of two descriptions: which symbols occur and where, and copies.

    Copied are the steps from symbol to symbol, which repeat both where the symbols do and where they count.
    """
    size = next(size for size in _SIZES if max(symbols) < size)
    num_distinct = len(set(symbols))
    steps = bytes([(after - before) % size for before, after in pairwise(b"\0" + symbols)])
    return min(
        log2(comb(size, num_distinct)) + len(symbols) * log2(num_distinct),
        _copy_bits(steps, log2(size)),
    )


def _copy_bits(symbols: bytes, symbol_bits: float) -> float:
    """Describe symbols one by one or as copies (start and length) of what stands before; one in five is a copy."""
    single_bits = symbol_bits - log2(0.8)
    copy_bits = 2 * log2(len(symbols)) - log2(0.2)
    shortest = int(copy_bits / single_bits) + 1
    if len(set(zip(*(symbols[skipped:] for skipped in range(shortest)), strict=False))) == len(symbols) - shortest + 1:
        # Nothing occurs twice, as in most random ids.
        return len(symbols) * single_bits
    bits, at = 0.0, 0
    while at < len(symbols):
        end = at + shortest
        if end <= len(symbols) and symbols.find(symbols[at:end], 0, end - 1) >= 0:
            while end < len(symbols) and symbols.find(symbols[at : end + 1], 0, end) >= 0:
                end += 1
            bits, at = bits + copy_bits, end
        else:
            bits, at = bits + single_bits, at + 1
    return bits
