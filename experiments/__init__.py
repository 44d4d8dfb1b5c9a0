"""The paper's runs as TOML files; `dpfedexp.paper.experiments` reads them."""
