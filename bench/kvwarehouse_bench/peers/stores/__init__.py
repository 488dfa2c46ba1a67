"""What each store is asked to do, a module a store. Imported in the store's own environment."""
