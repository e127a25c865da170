"""What the object store holds: names, announcements, snapshots, and their bounds."""
