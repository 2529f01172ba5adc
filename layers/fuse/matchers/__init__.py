"""The matchers: each recognises one kind of module and defines its fused forward."""
