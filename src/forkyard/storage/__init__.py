"""What machines leave on disk: their disks (`disks`) and saved machines (`snapshots`)."""
