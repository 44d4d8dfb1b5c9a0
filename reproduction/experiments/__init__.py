"""The paper's runs as TOML files; `reproduction.paper.experiments` reads them."""
