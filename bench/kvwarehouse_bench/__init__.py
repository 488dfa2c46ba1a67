"""Benches: a warehouse against this machine's own limits (`kvwarehouse bench`), and beside
engines and peers (the programs in bench/)."""
