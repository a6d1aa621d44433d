"""How two ends of a connection prove to each other that they hold the job's key, without sending it.

    server ──  greeting, 32 random bytes s                         ──► client
    server ◄── 32 random bytes c, HMAC(key, "client", s, c)        ──  client
    server ──  HMAC(key, "server", s, c)                           ──► client

Both draw bytes of their own for each connection, so what was overheard on one proves nothing on another. The server says nothing that
depends on the key before the client has proven that it holds it.
"""

from __future__ import annotations

import hmac
import secrets

__all__ = ["GREETING", "NONCE_BYTES", "PROOF_BYTES", "fresh_nonce", "is_proof", "proof"]

GREETING = b"penstock store 1\n"
NONCE_BYTES = PROOF_BYTES = 32


def fresh_nonce() -> bytes:
    """Random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The proof that only a holder of the key can give as `role` ("client" or "server") on the connection of these two nonces."""
    # No seal of a value is a proof: what it authenticates begins with the length of a name, which would be two billion letters here.
    return hmac.digest(key, f"penstock {role} ".encode() + server_nonce + client_nonce, "sha256")


def is_proof(said: bytes, key: bytes, role: str, server_nonce: bytes, client_nonce: bytes) -> bool:
    """Whether it is that, found out in the same time for any wrong one."""
    return hmac.compare_digest(said, proof(key, role, server_nonce, client_nonce))
