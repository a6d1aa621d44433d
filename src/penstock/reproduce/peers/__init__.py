"""Planners of other systems, run from a checkout beside ours in processes of their own: nothing of them is imported here."""

from penstock.reproduce.peers.checkout import Peer, PeerError, PeerRun, peers_of

__all__ = ["Peer", "PeerError", "PeerRun", "peers_of"]
