"""kvwarehouse_connectors: what joins inference engines to the warehouse.

`core` has what engines share; each engine has a folder that needs only that engine. Connectors
use the public `kvwarehouse` package and nothing beneath it.
"""
