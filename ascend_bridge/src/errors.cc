#include "errors.h"

namespace deepinfer::ascend {
namespace {

struct Range {
  int32_t first;
  int32_t last;
  StatusClass meaning;
};

// First match wins.
constexpr Range kRanges[] = {
    {0, 0, {Code::kOk, false}},
    {100000, 100000, {Code::kInvalidArgument, false}},
    {100001, 100001, {Code::kFailedPrecondition, false}},
    {100002, 100002, {Code::kOk, false}},  // initialised before
    {107000, 107000, {Code::kInvalidArgument, false}},
    {107001, 107001, {Code::kNotFound, false}},
    {107002, 107003, {Code::kInternal, false}},
    {107017, 107017, {Code::kInvalidArgument, false}},
    {107019, 107020, {Code::kDeadlineExceeded, false}},
    {107022, 107023, {Code::kAborted, false}},
    {107024, 107033, {Code::kFailedPrecondition, false}},
    {107035, 107035, {Code::kAborted, false}},
    {107036, 107038, {Code::kFailedPrecondition, false}},
    {161001, 161002, {Code::kInvalidArgument, false}},
    {200000, 200000, {Code::kResourceExhausted, false}},
    {200001, 200001, {Code::kUnimplemented, false}},
    {200002, 200002, {Code::kNotFound, false}},
    {200006, 200006, {Code::kUnimplemented, false}},
    {207000, 207000, {Code::kUnimplemented, false}},
    {207001, 207001, {Code::kResourceExhausted, false}},
    {207004, 207004, {Code::kNotFound, false}},
    {207005, 207008, {Code::kResourceExhausted, false}},
    {207015, 207015, {Code::kOk, false}},  // initialised before
    {207018, 207018, {Code::kResourceExhausted, false}},
    {207020, 207020, {Code::kDeadlineExceeded, false}},
    {361001, 361001, {Code::kInternal, false}},
    {507014, 507014, {Code::kDeadlineExceeded, false}},
    {507015, 507016, {Code::kInternal, true}},
    {507017, 507017, {Code::kDeadlineExceeded, false}},
    {507034, 507034, {Code::kDeadlineExceeded, false}},
    {507035, 507036, {Code::kInternal, true}},
    {507046, 507047, {Code::kDeadlineExceeded, false}},
    {507053, 507055, {Code::kDataLoss, true}},
    {507056, 507057, {Code::kUnavailable, false}},
    {507903, 507903, {Code::kFailedPrecondition, false}},
    {507904, 507904, {Code::kUnavailable, false}},
    {561001, 561002, {Code::kInvalidArgument, false}},
    {561003, 561003, {Code::kUnimplemented, false}},
    {561107, 561107, {Code::kUnimplemented, false}},
    {561112, 561112, {Code::kUnimplemented, false}},
};

}  // namespace

StatusClass Classify(int32_t status) {
  for (const Range& range : kRanges) {
    if (status >= range.first && status <= range.last) return range.meaning;
  }
  return {Code::kInternal, false};
}

Code ClassifyCollective(int32_t result) {
  switch (result) {
    case 0:
      return Code::kOk;
    case 1:  // parameter
    case 2:  // null
      return Code::kInvalidArgument;
    case 3:   // memory
    case 24:  // out of memory
      return Code::kResourceExhausted;
    case 5:  // unsupported
      return Code::kUnimplemented;
    case 6:  // not found
      return Code::kNotFound;
    case 9:  // time-out
      return Code::kDeadlineExceeded;
    case 22:  // suspending
      return Code::kAborted;
    case 7:   // unavailable
    case 11:  // connections and transfers
    case 12:
    case 13:
    case 14:
    case 19:  // network
    case 20:  // again
    case 21:  // remote
    case 23:  // retry failed
      return Code::kUnavailable;
    default:
      return Code::kInternal;
  }
}

}  // namespace deepinfer::ascend
