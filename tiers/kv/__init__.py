"""What the bytes of KV are: geometry, slot images, copies, fence pages and the shared index."""
