"""The bus and its two ends: streams, consumer loop, hand-over, log reader, trainer client, controller, replay."""
