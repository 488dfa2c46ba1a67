#include "bindings/pages.h"

#include <nanobind/stl/vector.h>

#include <string>

namespace kvw::bindings {

Pages::Pages(nb::handle tokens, nb::handle keys) {
  if (tokens.is_none() == keys.is_none())
    throw Error(ErrorKind::usage, "bad_tokens", "give either tokens or keys");
  if (!tokens.is_none())
    tokens_.emplace(tokens);
  else if (nb::isinstance<nb::tuple>(keys))
    hold_runs(nb::borrow<nb::tuple>(keys));
  else
    hold(keys);
}

void Pages::hold(nb::handle keys) {
  const size_t count = nb::len(keys);
  held_.reserve(count);
  spans_.reserve(count);
  for (nb::handle item : nb::cast<nb::sequence>(keys)) spans_.push_back(held(item));
}

void Pages::hold_runs(const nb::tuple& runs) {
  if (runs.size() != 4)
    throw Error(ErrorKind::usage, "bad_runs", "runs are (keys, pages, positions, parents)");
  hold(runs[0]);
  const auto pages = nb::cast<std::vector<size_t>>(runs[1]);
  const auto positions = nb::cast<std::vector<uint32_t>>(runs[2]);
  const auto parents = nb::cast<nb::list>(runs[3]);
  if (positions.size() != pages.size() || parents.size() != pages.size())
    throw Error(ErrorKind::usage, "bad_runs", "each run has its pages, position and parent");
  runs_.emplace();
  runs_->reserve(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const nb::handle parent = parents[i];
    runs_->push_back(
        {pages[i], positions[i], parent.is_none() ? std::span<const std::byte>() : held(parent)});
  }
}

std::span<const std::byte> Pages::held(nb::handle item) {
  if (!nb::isinstance<nb::bytes>(item))
    throw Error(ErrorKind::usage, "bad_keys", "keys must be bytes objects");
  const nb::bytes& key = held_.emplace_back(nb::borrow<nb::bytes>(item));
  if (key.size() == 0 || key.size() > kMaxEngineKeyBytes)
    throw Error(ErrorKind::usage, "bad_keys",
                "key " + std::to_string(held_.size() - 1) + " has " + std::to_string(key.size()) +
                    " bytes; keys have 1 to " + std::to_string(kMaxEngineKeyBytes));
  return {static_cast<const std::byte*>(key.data()), key.size()};
}

}  // namespace kvw::bindings
