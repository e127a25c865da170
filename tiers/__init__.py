"""kvlake's tiers: what bytes of KV are, and where they are kept."""
