// The pages of a call, as Python names them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "bindings/bindings.h"
#include "client/prompt.h"

namespace kvw::bindings {

// Tokens or keys, held for the length of a call that runs without the GIL. `keys` is a list of
// bytes, or a tuple (keys of all runs, pages, positions and parents by run). Throws Error usage
// "bad_tokens", "bad_keys", "bad_runs".
class Pages {
 public:
  Pages(nb::handle tokens, nb::handle keys);
  // Makes the call with their prompt, without the GIL.
  template <class Call>
  auto without_gil(const Call& call) const {
    const WithoutGil release;
    Prompt prompt = tokens_ ? Prompt::of_tokens(tokens_->view())
                    : runs_ ? Prompt::of_runs(spans_, *runs_)
                            : Prompt::of_keys(spans_);
    return call(prompt);
  }

 private:
  void hold(nb::handle keys);
  void hold_runs(const nb::tuple& runs);
  std::span<const std::byte> held(nb::handle item);

  std::optional<Tokens> tokens_;
  std::vector<nb::bytes> held_;
  std::vector<std::span<const std::byte>> spans_;
  std::optional<std::vector<KeyRun>> runs_;
};

}  // namespace kvw::bindings
