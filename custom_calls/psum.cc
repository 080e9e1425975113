// The sum of x over the devices of a group.
#include "collective.h"

namespace deepinfer::custom_calls {
namespace {

std::vector<Tensor> Infer(const Request& request) {
  NeedGroup(request);
  return {ResultOf(request.in(0).dtype, request.in(0).dims)};
}

void Enqueue(const Request& request, Call& call, const std::vector<Tensor>& results) {
  const Tensor& x = request.in(0);
  const HcclComm comm = CommunicatorOf(request, call).comm;
  ascend::CheckCollective(
      call.collectives().HcclAllReduce(x.address, results[0].address, ascend::CountOf(x.dims), HcclTypeOf(x.dtype),
                                       ascend::kHcclSum, comm, call.device().stream()),
      "HcclAllReduce");
  call.device().Enqueued("HcclAllReduce");
}

}  // namespace

const Target& PsumTarget() {
  static const Target target{"deepinfer.cann.psum.v2",
                             "DeepinferPsum",
                             "the sum of x over the devices of a group",
                             {},
                             {{"x", CollectiveTypes(), "(N, ...), equal on all devices of a group"}},
                             GroupAttributes(),
                             {{"y", "as x"}},
                             false,
                             Infer,
                             Enqueue};
  return target;
}

}  // namespace deepinfer::custom_calls
