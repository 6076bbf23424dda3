"""`lily bench`: how fast a model runs on a device, beside what that device can do at best."""
