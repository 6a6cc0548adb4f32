// Registers operations with TensorFlow, and what a kernel sees of a call.

#ifndef HOP_TF_OPS_TENSORFLOW_REGISTRY_H_
#define HOP_TF_OPS_TENSORFLOW_REGISTRY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/hop_tf_kernels.h"
#include "tf_c_api.h"

namespace hop_tf {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using TensorPointer = std::unique_ptr<TF_Tensor, DeleteTensor>;

struct DeleteStatus {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};
using StatusPointer = std::unique_ptr<TF_Status, DeleteStatus>;

struct DeleteShape {
  void operator()(TF_ShapeHandle* shape) const { TF_DeleteShapeHandle(shape); }
};
using ShapePointer = std::unique_ptr<TF_ShapeHandle, DeleteShape>;

// The attributes of all operations; each has some of them.
struct Attributes {
  float spacing = 0.5f;
  int64_t block_size = 0;
  TF_Bool round_to_nearest = 0;
};

// An input or output of a call.
class Tensor {
 public:
  explicit Tensor(TF_Tensor* tensor) : tensor_(tensor) {}

  int64_t size() const { return TF_TensorElementCount(tensor_.get()); }
  TF_DataType type() const { return TF_TensorType(tensor_.get()); }
  std::vector<int64_t> shape() const;
  std::string ShapeInWords() const;  // As [2, 3].

  template <typename T>
  T* data() const {
    return static_cast<T*>(TF_TensorData(tensor_.get()));
  }

 private:
  TensorPointer tensor_;
};

// A kernel's failure; becomes the operation's error.
struct Failure {
  TF_Code code;
  std::string message;
};

// One execution of an operation.
class Call {
 public:
  Call(TF_OpKernelContext* context, const Attributes& attributes) : attributes_(attributes), context_(context) {}

  const Attributes& attributes() const { return attributes_; }
  TF_OpKernelContext* context() const { return context_; }

  // Each throws Failure.
  Tensor Input(int index) const;
  Tensor Output(int index, TF_DataType type, const std::vector<int64_t>& shape) const;
  // Output `index`, with the type of input `input` and in its memory where nobody else needs that. A Tensor of that
  // input is somebody else.
  Tensor ForwardedOutput(int index, int input, const std::vector<int64_t>& shape) const;
  // Memory of the operation's device, until the tensor dies.
  Tensor Scratch(int64_t num_bytes) const;

 private:
  const Attributes& attributes_;
  TF_OpKernelContext* context_;
};

void Check(bool condition, const std::string& message);  // Throws an invalid argument.
void Check(HopTfStatus status, const char* reason);      // The device's reason for HOP_TF_DEVICE_ERROR.
HopTfType TypeOf(const Tensor& tensor);

using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// Output 0 has the shape of input 0; input 1 is a vector. The sizes of other outputs follow from attributes, which
// the C API does not show to these functions: the Python functions tell them where they can.
void InferShape(TF_ShapeInferenceContext* context, TF_Status* status);

// Moreover, output 1 has the shape of input 1.
void InferBothShapes(TF_ShapeInferenceContext* context, TF_Status* status);

struct Operation {
  const char* name;
  std::vector<const char*> attributes;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  ShapeFunction infer_shapes = InferShape;
};

void RegisterOperation(const Operation& operation);

using Kernel = void (*)(const Call&);

void Run(Kernel kernel, void* attributes, TF_OpKernelContext* context);
void RegisterKernel(const char* operation, const char* device, void (*compute)(void*, TF_OpKernelContext*));

// Registers a kernel. Its attributes are read once; what it throws becomes the operation's error.
template <Kernel kernel>
void RegisterKernel(const char* operation, const char* device) {
  const auto compute = [](void* attributes, TF_OpKernelContext* context) { Run(kernel, attributes, context); };
  RegisterKernel(operation, device, compute);
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_TENSORFLOW_REGISTRY_H_
