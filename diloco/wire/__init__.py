"""The wire format: generated protobuf code (`v1`) and its conversion to plain values."""
