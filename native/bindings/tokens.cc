#include "bindings/bindings.h"

namespace kvw::bindings {

namespace {

constexpr uint64_t kTokenLimit = 1ull << 32;

// An id is out of range exactly when a bit above the 32nd is set (a sign extends into them), so one
// OR over all of them decides; unlike a 64-bit compare, every vector unit has that.
template <class T>
void refuse_out_of_range(uint64_t seen, const T* ids, size_t count) {
  if (seen < kTokenLimit) return;
  for (size_t i = 0; i < count; ++i)
    if (static_cast<uint64_t>(ids[i]) >= kTokenLimit)
      throw Error(ErrorKind::usage, "bad_tokens",
                  "token " + std::to_string(i) + " is " + std::to_string(ids[i]) +
                      "; token ids must be 0 to 4294967295");
}

void check_signs(const int32_t* ids, size_t count) {
  int32_t seen = 0;
  for (size_t i = 0; i < count; ++i) seen |= ids[i];
  refuse_out_of_range(static_cast<uint64_t>(seen), ids, count);
}

template <class T>
void convert(const T* ids, size_t count, std::vector<uint32_t>& copy) {
  copy.resize(count);
  uint64_t seen = 0;
  for (size_t i = 0; i < count; ++i) {
    seen |= static_cast<uint64_t>(ids[i]);
    copy[i] = static_cast<uint32_t>(ids[i]);
  }
  refuse_out_of_range(seen, ids, count);
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
    check_signs(static_cast<const int32_t*>(data), count);
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
