"""What a tokenizer's folder declares beside its vocabulary: tokens that were added to it, and the one that ends a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError
from penstock.files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["DECLARING_FILES", "add_declared_tokens", "declared_end_token", "tokenizer_folder"]

_CONFIG, _ADDED, _SPECIALS = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
DECLARING_FILES = _CONFIG, _ADDED, _SPECIALS


def tokenizer_folder(path: str | Path) -> Path:
    """The folder of a tokenizer that is named by its folder, or by a file in it."""
    return Path(path) if Path(path).is_dir() else Path(path).parent


def declared_end_token(path: str | Path) -> str | None:
    """The text of the token that ends a text, as the folder of the tokenizer says."""
    for name in (_CONFIG, _SPECIALS):
        found = _object(tokenizer_folder(path) / name).get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str) and found:
            return found
    return None


def add_declared_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Adds the tokens that the folder of a vocabulary declares beside it, each with the id that it has there."""
    from tokenizers import AddedToken

    for place, entry in sorted(_declared(path.parent).items()):
        text, special = entry["content"], bool(entry.get("special", False))
        options = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry}
        tokenizer.add_tokens([AddedToken(text, special=special, **options)])
        if (found := tokenizer.token_to_id(text)) != place:
            raise InputError(
                f"tokenizer '{path}' has token '{text}' at {found}, but its folder declares it at {place}: its vocabulary has an order of "
                "its own. Give a tokenizer.json, as AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER) of transformers writes it."
            )


def _declared(folder: Path) -> dict[int, dict[str, Any]]:
    """Added tokens by their ids, from the newer kind of file or the older one."""
    decoder = _object(folder / _CONFIG).get("added_tokens_decoder")
    added = _object(folder / _ADDED)
    found = {place: {"content": text, "special": True} for text, place in added.items() if isinstance(place, int)}
    if isinstance(decoder, dict):
        entries = ((place, entry) for place, entry in decoder.items() if place.isdecimal() and isinstance(entry, dict))
        found |= {int(place): entry for place, entry in entries if isinstance(entry.get("content"), str)}
    return found


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    found = read_json(path, "tokenizer's file") if path.is_file() else {}
    return found if isinstance(found, dict) else {}
