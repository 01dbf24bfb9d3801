"""Parameter servers: some ranks store the parameters and the optimizer, and the other ranks train.

Li et al., 2014, "Scaling Distributed Machine Learning with the Parameter Server"; bounded staleness after Ho et al.,
2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
docs/guides/parameter-server.md explains the protocol.

    with farandole.init() as runtime, ParameterServer(runtime.comm, servers=1) as servers:
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        with servers.session(model, optimizer=sgd, mode="async", staleness=3) as session:
            if session.is_worker:
                for images, labels in my_share(session.worker, session.workers):
                    session.pull()
                    F.cross_entropy(model(images), labels).backward()
                    session.push()
        # every worker's model then has the final parameters
"""

from farandole.parallel.parameter_server.errors import AllWorkersLost, ServerLost
from farandole.parallel.parameter_server.roles import ParameterServer
from farandole.parallel.parameter_server.server import Report
from farandole.parallel.parameter_server.session import Session

__all__ = ["AllWorkersLost", "ParameterServer", "Report", "ServerLost", "Session"]
