"""Channels of a Mamba-1 layer grouped by how far back each looks: k-means on offset profiles."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from models.errors import ConfigError
from models.mixers.entries import ScanEntries

MAX_OFFSET = 64
MAX_DESTINATIONS = 256


def cluster_channels(entries: ScanEntries, n_clusters: int) -> Int64[Tensor, "cluster d_entry"]:
    """Channel indices of each cluster, ascending, padded with -1 to the largest cluster.

    Clusters are ordered by mean offset, the nearest-looking first. The same input gives the same clusters.

    Raises:
        ConfigError: fewer channels than clusters, or less than one cluster.
    """
    if not 1 <= n_clusters <= entries.d_entry:
        raise ConfigError(
            f"cluster:{n_clusters} asks for {n_clusters} clusters; accepted: 1..{entries.d_entry}"
        )
    profiles = offset_profiles(entries).detach()
    offsets = torch.arange(profiles.shape[1], device=profiles.device, dtype=profiles.dtype)
    label = _k_means(profiles, n_clusters)
    members = [torch.nonzero(label == cluster)[:, 0] for cluster in range(n_clusters)]
    members.sort(key=lambda m: float((profiles[m] @ offsets).mean()) if len(m) else float("inf"))
    index = torch.full((n_clusters, max(map(len, members))), -1, device=profiles.device)
    for row, channels in zip(index, members, strict=True):
        row[: len(channels)] = channels
    return index


def offset_profiles(entries: ScanEntries) -> Float[Tensor, "channel offset"]:
    """Mean |A[c, i, i - offset]| over destinations, each channel's profile summing to 1.

    Offsets 0 .. 63 or the sequence's length; at most 256 destinations, evenly spread over batch and the
    positions that have all these offsets behind them.
    """
    batch, seq = entries.dt.shape[:2]
    n_offsets = min(seq, MAX_OFFSET)
    # The last half of a short sequence, so that all offsets have destinations.
    first = min(n_offsets - 1, seq // 2)
    dest = torch.arange(first, seq, device=entries.dt.device).repeat(batch)
    which = torch.arange(batch, device=dest.device).repeat_interleave(seq - first)
    pick = torch.linspace(0, len(dest) - 1, min(len(dest), MAX_DESTINATIONS), device=dest.device).long()
    dest, which = dest[pick], which[pick]
    columns = []
    for offset in range(n_offsets):
        size = entries.edges(which, dest, dest - offset).abs().sum(1)
        columns.append(size.sum(0) / (dest >= offset).sum().clamp_min(1))
    profile = torch.stack(columns, 1)
    return profile / profile.sum(1, keepdim=True).clamp_min(torch.finfo(profile.dtype).tiny)


def _k_means(points: Float[Tensor, "point axis"], k: int) -> Int64[Tensor, " point"]:
    """Lloyd's iterations from farthest-first centres; no random number is drawn."""
    centres = points[(points - points.mean(0)).norm(dim=1).argmin()][None]
    while len(centres) < k:
        centres = torch.cat((centres, points[torch.cdist(points, centres).min(1).values.argmax()][None]))
    label = torch.cdist(points, centres).argmin(1)
    for _ in range(50):
        centres = torch.stack(
            [points[label == c].mean(0) if (label == c).any() else centres[c] for c in range(k)]
        )
        new = torch.cdist(points, centres).argmin(1)
        if torch.equal(new, label):
            break
        label = new
    return label
