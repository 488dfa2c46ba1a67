"""Generated code. Only kvwarehouse.wire imports it."""
