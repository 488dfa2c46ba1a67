#include "bindings/bindings.h"

namespace kvw::bindings {

namespace {

constexpr uint64_t kTokenLimit = 1ull << 32;

// Widened compare in blocks without an early exit, so that it vectorises.
template <class T>
void check_range(const T* ids, size_t count) {
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t end = begin + kBlock < count ? begin + kBlock : count;
    bool bad = false;
    for (size_t i = begin; i < end; ++i) bad |= static_cast<uint64_t>(ids[i]) >= kTokenLimit;
    if (!bad) continue;
    for (size_t i = begin; i < end; ++i)
      if (static_cast<uint64_t>(ids[i]) >= kTokenLimit)
        throw Error(ErrorKind::usage, "bad_tokens",
                    "token " + std::to_string(i) + " is " + std::to_string(ids[i]) +
                        "; token ids must be 0 to 4294967295");
  }
}

template <class T>
void convert(const T* ids, size_t count, std::vector<uint32_t>& copy) {
  check_range(ids, count);
  copy.resize(count);
  for (size_t i = 0; i < count; ++i) copy[i] = static_cast<uint32_t>(ids[i]);
}

}  // namespace

Tokens::Tokens(nb::handle array) {
  if (!nb::try_cast(array, array_) || array_.ndim() != 1 ||
      (array_.shape(0) > 1 && array_.stride(0) != 1))
    throw Error(ErrorKind::usage, "bad_tokens",
                "tokens must be a one-dimensional, contiguous integer array");
  const size_t count = array_.shape(0);
  const auto type = array_.dtype();
  const void* data = array_.data();
  if (type == nb::dtype<uint32_t>()) {
    view_ = {static_cast<const uint32_t*>(data), count};
  } else if (type == nb::dtype<int32_t>()) {
    check_range(static_cast<const int32_t*>(data), count);
    view_ = {static_cast<const uint32_t*>(data), count};
  } else {
    if (type == nb::dtype<int64_t>())
      convert(static_cast<const int64_t*>(data), count, copy_);
    else if (type == nb::dtype<uint64_t>())
      convert(static_cast<const uint64_t*>(data), count, copy_);
    else
      throw Error(ErrorKind::usage, "bad_tokens",
                  "tokens must be 32 or 64 bit integers, signed or not");
    view_ = copy_;
  }
}

}  // namespace kvw::bindings
